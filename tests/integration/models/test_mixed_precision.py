"""`parallel.param_dtype=bfloat16` means the same on one rank and on several: compute in bfloat16, keep float32."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.models.huggingface import export
from composer.models.trainer import Microbatch
from composer.schema import Dtype, ModelConfig, ParallelConfig
from tests.integration.models.ranks import run_ranks
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")

HALF = ParallelConfig(param_dtype=Dtype.bfloat16)


def train(model: ModelConfig, folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    """The formats that a forward pass meets, log-probabilities before training, and the losses of three steps."""
    trainer = build(model, folder, parallel)
    formats = {}
    for name, module in trainer.model_parts[0].named_modules():
        if name == "lm_head" or name.endswith(("router.gate", "inner_experts")):
            kind = name.rpartition(".")[2]
            module.register_forward_hook(lambda _, args, out, kind=kind: formats.update({kind: str(out.dtype)}))
    score = trainer.score(batch(9)).tolist()
    rank, size = trainer.data_parallel
    losses = []
    for step in range(3):
        data = batch(step)
        mine = Microbatch(*(x[rank::size] for x in (data.tokens, data.labels, data.positions)))
        losses.append(trainer.update([mine])["loss"])
    kept = {str(p.dtype) for p in trainer.shards()} | {
        str(t.dtype) for o in trainer.optimizers for s in o.state.values() for t in s.values()
    }
    export(trainer, model, folder / "hf")
    trainer.close()
    return {"formats": formats, "score": score, "losses": losses, "kept": kept}


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda m: m.name)
def test_one_rank_computes_in_bfloat16_and_keeps_float32(model: ModelConfig, tmp_path: Path) -> None:
    for name in ("half", "full", "two"):
        (tmp_path / name).mkdir()
    [half] = run_ranks(1, lambda: train(model, tmp_path / "half", HALF), tmp_path / "half")
    [full] = run_ranks(1, lambda: train(model, tmp_path / "full", ParallelConfig()), tmp_path / "full")
    shard2 = dataclasses.replace(HALF, data_parallel_shard=2)
    two = run_ranks(2, lambda: train(model, tmp_path / "two", shard2), tmp_path / "two")[0]

    # Routers compute in float32, as torchtitan has them on GPUs.
    expected = {"lm_head": "torch.bfloat16", "inner_experts": "torch.bfloat16", "gate": "torch.float32"}
    assert half["formats"] == two["formats"] == expected
    assert set(full["formats"].values()) == {"torch.float32"}
    assert half["kept"] == {"torch.float32"}

    exact, rounded, other = (torch.tensor(r["score"]) for r in (full, half, two))
    assert 1e-4 < (exact - rounded).abs().mean() < 0.05
    assert (rounded - other).abs().mean() < 1e-3
    assert half["losses"] != full["losses"]
    assert half["losses"][0] == pytest.approx(two["losses"][0], abs=5e-3)
    assert half["losses"] == pytest.approx(full["losses"], abs=0.1)
