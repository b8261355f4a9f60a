"""The planned memory of a trainer rank against what autograd really keeps."""

import dataclasses
from pathlib import Path

import pytest
import torch

from composer.models.sizes import count_parameters, trainer_memory
from composer.schema import ModelConfig, ParallelConfig
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize(
    "model",
    [
        QWEN,
        dataclasses.replace(QWEN, hidden_size=128, head_dim=32, num_layers=3, num_experts=16, expert_ffn_size=128),
        DEEPSEEK,
        dataclasses.replace(DEEPSEEK, hidden_size=128, num_layers=4, expert_ffn_size=128, dense_ffn_size=256),
    ],
    ids=["qwen3", "wider-qwen3", "deepseek", "wider-deepseek"],
)
def test_estimates(model: ModelConfig, tmp_path: Path) -> None:
    trainer = build(model, tmp_path)
    module, data = trainer.model_parts[0], batch(0, rows=8, length=128)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(data.tokens, positions=data.positions, attention_masks=None).sum()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    measured = sum(size for pointer, size in storages.items() if pointer not in parameters)
    planned = trainer_memory(model, ParallelConfig(), 8 * 128)
    assert planned.activations == pytest.approx(measured, rel=0.2)
    assert planned.parameters == 4 * count_parameters(model).total == 4 * sum(p.numel() for p in module.parameters())
    trainer.update([data])
    moments = [t for o in trainer.optimizers for s in o.state.values() for t in s.values() if t.numel() > 1]
    assert planned.optimizer == sum(t.numel() * t.element_size() for t in moments)
    trainer.close()
