"""The experts' load is that of the tokens that a loss depends on: padding neither shows in it nor moves the bias."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.models.huggingface import export
from composer.models.titan_experts import without_loss
from composer.models.trainer import Microbatch, TitanTrainer
from composer.schema import ModelConfig, ParallelConfig
from composer.types import NO_LABEL
from tests.integration.models.ranks import run_ranks
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")

ROW, LENGTHS = 32, (32, 8, 20, 4, 28, 12, 16, 24)
"""256 positions, of which 144 are filled."""


def documents() -> list[Microbatch]:
    """One sequence each, without padding."""
    return [batch(i, rows=1, length=length) for i, length in enumerate(LENGTHS)]


def padded(own_document: bool) -> Microbatch:
    """All of them, a row each, padded with token 0 to `ROW`, in a document of its own (RL) or not (SFT)."""
    rows = []
    for document in documents():
        missing = ROW - document.tokens.shape[1]
        filled = [
            torch.nn.functional.pad(x, (0, missing), value=v)
            for x, v in ((document.tokens, 0), (document.labels, NO_LABEL))
        ]
        start = 0 if own_document else ROW - missing
        rows.append((*filled, torch.cat([document.positions, torch.arange(start, start + missing)[None]], dim=1)))
    return Microbatch(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def of_rank(data: Microbatch, rank: int, size: int) -> Microbatch:
    return Microbatch(*(x[rank::size] for x in (data.tokens, data.labels, data.positions)))


def load_by_transformers(folder: Path) -> float:
    """The largest count of tokens of an expert over the mean count, from transformers' router."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    counts = torch.zeros(QWEN.num_layers, QWEN.num_experts)
    for document in documents():
        with torch.no_grad():
            layers = model(document.tokens, output_router_logits=True).router_logits
        for counted, logits in zip(counts, layers, strict=True):
            chosen = logits.topk(QWEN.experts_per_token).indices
            counted += torch.bincount(chosen.flatten(), minlength=QWEN.num_experts)
    return float((counts.amax(1) / counts.mean(1)).max())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("model")

    def exported() -> None:
        trainer = build(QWEN, folder)
        export(trainer, QWEN, folder / "hf")
        trainer.close()

    run_ranks(1, exported, folder)
    return load_by_transformers(folder / "hf")


def biases(trainer: TitanTrainer) -> list[list[float]]:
    buffers = dict(trainer.model_parts[0].named_buffers())
    found = [buffers[name] for name in sorted(buffers) if name.endswith("expert_bias_E")]
    return [getattr(bias, "_local_tensor", bias).tolist() for bias in found]


def update(
    model: ModelConfig, parallel: ParallelConfig, folder: Path, data: Callable[[], list[Microbatch]]
) -> dict[str, Any]:
    pipeline = parallel.pipeline_parallel > 1
    trainer = build(model, folder, parallel, pipeline_microbatches=len(LENGTHS) if pipeline else 1)
    rank, size = trainer.data_parallel
    metrics = trainer.update([of_rank(m, rank, size) for m in data()])
    trainer.close()
    return {"load": metrics["worst_expert_load"], "bias": biases(trainer)}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("own_document", [False, True])
def test_padding_does_not_show(own_document: bool, recompute: bool, expected: float, tmp_path: Path) -> None:
    parallel = ParallelConfig(activation_checkpoint=recompute)
    data = padded(own_document)
    assert without_loss(data.labels, data.positions).sum() == len(LENGTHS) * ROW - sum(LENGTHS)
    assert update(QWEN, parallel, tmp_path, lambda: [data])["load"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_does_not_move_the_bias(recompute: bool, tmp_path: Path) -> None:
    parallel = ParallelConfig(activation_checkpoint=recompute)
    apart = update(DEEPSEEK, parallel, tmp_path / "a", documents)
    together = update(DEEPSEEK, parallel, tmp_path / "b", lambda: [padded(True)])
    assert together == apart and any(any(layer) for layer in apart["bias"])


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel_shard=2, expert_parallel=2),
        ParallelConfig(tensor_parallel=2),
        ParallelConfig(tensor_parallel=2, expert_parallel=2),
        ParallelConfig(context_parallel=2),
        ParallelConfig(pipeline_parallel=2, activation_checkpoint=True),
    ],
    ids=["shard2-expert2", "tensor2", "tensor2-expert2", "context2", "pipeline2"],
)
def test_on_a_mesh(parallel: ParallelConfig, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    model = dataclasses.replace(DEEPSEEK, num_layers=4)
    data = padded(True)
    [one] = run_ranks(1, lambda: update(model, ParallelConfig(), tmp_path / "one", documents), tmp_path / "one")
    if parallel.pipeline_parallel > 1:
        parts = [Microbatch(*(x[i : i + 1] for x in (data.tokens, data.labels, data.positions))) for i in range(8)]
    else:
        parts = [data]
    for rank in run_ranks(2, lambda: update(model, parallel, tmp_path, lambda: parts), tmp_path):
        assert rank["load"] == pytest.approx(one["load"], rel=0.02)  # a router may flip in the last bit
