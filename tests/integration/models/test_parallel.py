"""Every axis of the mesh trains to the same losses as one process, from the same random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.models import titan_layers
from composer.models.huggingface import export
from composer.models.trainer import Microbatch
from composer.schema import ModelConfig, ParallelConfig
from tests.integration.models.ranks import run_ranks
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")

UNTIED = dataclasses.replace(QWEN, name="tiny-untied", tie_embeddings=False)
STEPS = 4
MESHES = {
    "shard2": ParallelConfig(data_parallel_shard=2),
    "replicate2": ParallelConfig(data_parallel_replicate=2),
    "shard2-expert2": ParallelConfig(data_parallel_shard=2, expert_parallel=2),
    "tensor2": ParallelConfig(tensor_parallel=2),
    "context2": ParallelConfig(context_parallel=2),
    "pipeline2": ParallelConfig(pipeline_parallel=2),
}


def rows(data: Microbatch, start: int, step: int) -> Microbatch:
    """Every `step`-th row from `start`."""
    return Microbatch(data.tokens[start::step], data.labels[start::step], data.positions[start::step])


def train(model: ModelConfig, folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    """Four steps on the same 8 rows a step, cut as the mesh wants them, then a score and an export."""
    trainer = build(model, folder, parallel, pipeline_microbatches=8 if parallel.pipeline_parallel > 1 else 1)
    rank, size = trainer.data_parallel
    losses, norms = [], []
    for step in range(STEPS):
        mine = rows(batch(step, rows=8), rank, size)
        if parallel.pipeline_parallel > 1:
            microbatches = [rows(mine, i, 8) for i in range(8)]
        else:  # two micro-batches of unequal size: the mean is over tokens, however they are cut
            quarter = max(1, len(mine.tokens) // 4)
            microbatches = [
                Microbatch(*(x[cut] for x in (mine.tokens, mine.labels, mine.positions)))
                for cut in (slice(quarter), slice(quarter, None))
            ]
        metrics = trainer.update(microbatches)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    mine = rows(batch(98, rows=8), rank, size)
    mean_loss = trainer.mean_loss([rows(mine, i, 8) for i in range(8)] if parallel.pipeline_parallel > 1 else [mine])
    score = None if parallel.pipeline_parallel > 1 else trainer.score(batch(99, rows=2)).tolist()
    export(trainer, model, folder / "hf")
    trainer.close()
    load = metrics["worst_expert_load"]
    return {"loss": losses, "grad_norm": norms, "score": score, "mean_loss": mean_loss, "load": load}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process gets."""
    found = {}
    for model in (QWEN, UNTIED, DEEPSEEK):
        folder = tmp_path_factory.mktemp(model.name)
        found[model.name] = {
            **run_ranks(1, lambda m=model, f=folder: train(m, f, ParallelConfig()), folder)[0],
            "folder": folder / "hf",
        }
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda m: m.name)
def test_a_mesh_trains_like_one_process(
    model: ModelConfig, mesh: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    if mesh == "pipeline2" and model.tie_embeddings:
        model = UNTIED  # first and last stage cannot share a matrix
    expected = reference[model.name]
    results = run_ranks(2, lambda: train(model, tmp_path, MESHES[mesh]), tmp_path)
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert result["mean_loss"] == pytest.approx(expected["mean_loss"], abs=1e-4)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert result["load"] == pytest.approx(expected["load"], rel=0.02)  # a few routers flip in the last bit
        if result["score"] is not None:
            torch.testing.assert_close(
                torch.tensor(result["score"]), torch.tensor(expected["score"]), atol=5e-4, rtol=0
            )
    assert same_weights(tmp_path / "hf", expected["folder"])


def test_context_parallelism_moves_latents_only(tmp_path: Path) -> None:
    def moved() -> list[int]:
        sizes, gather = [], titan_layers.flex_cp_allgather

        def recorded(latent: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
            sizes.append(latent[0, 0].numel() + key[0, 0].numel())
            return gather(latent, key, *rest)

        titan_layers.flex_cp_allgather = recorded
        trainer = build(DEEPSEEK, tmp_path, MESHES["context2"])
        trainer.update([batch(0)])
        trainer.close()
        return sizes

    assert run_ranks(2, moved, tmp_path)[0] == [32 + 16] * 3  # latent and rotary key a token, in each of 3 layers


def test_tensor_parallelism_takes_any_number_of_rows(tmp_path: Path) -> None:
    def odd(folder: Path, parallel: ParallelConfig) -> tuple[float, list[list[float]]]:
        trainer = build(QWEN, folder, parallel)
        found = trainer.update([batch(0, rows=3)])["loss"], trainer.score(batch(1, rows=1)).tolist()
        trainer.close()
        return found

    loss, score = run_ranks(1, lambda: odd(tmp_path / "one", ParallelConfig()), tmp_path)[0]
    (tmp_path / "rank0.pickle").unlink()
    for result in run_ranks(2, lambda: odd(tmp_path / "two", MESHES["tensor2"]), tmp_path):
        assert result[0] == pytest.approx(loss, abs=1e-4)
        torch.testing.assert_close(torch.tensor(result[1]), torch.tensor(score), atol=5e-4, rtol=0)


def test_experts_without_tokens_do_not_hang(tmp_path: Path) -> None:
    def collapsed(folder: Path, parallel: ParallelConfig) -> tuple[list[float], float]:
        trainer = build(QWEN, folder, parallel)
        with torch.no_grad():  # equal router logits: every token takes the same two experts, which live on one rank
            for block in trainer.model_parts[0].layers.values():
                block.moe.router.gate.weight.zero_()
        rank, size = trainer.data_parallel
        metrics = [trainer.update([rows(batch(step), rank, size)]) for step in range(2)]
        trainer.close()
        return [m["loss"] for m in metrics], metrics[0]["worst_expert_load"]

    one = run_ranks(1, lambda: collapsed(tmp_path / "one", ParallelConfig()), tmp_path)[0]
    (tmp_path / "rank0.pickle").unlink()
    for losses, load in run_ranks(2, lambda: collapsed(tmp_path / "two", MESHES["shard2-expert2"]), tmp_path):
        assert losses == pytest.approx(one[0], abs=1e-4)
        assert load == one[1] == 8 / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel_shard=2, context_parallel=2, expert_parallel=4),
        ParallelConfig(data_parallel_replicate=2, data_parallel_shard=2, expert_parallel=2),
        ParallelConfig(context_parallel=2, tensor_parallel=2),
        ParallelConfig(context_parallel=2, pipeline_parallel=2),
    ],
    ids=["shard2-context2-expert4", "replicate2-shard2-expert2", "context2-tensor2", "context2-pipeline2"],
)
def test_four_ranks(parallel: ParallelConfig, reference: dict[str, Any], tmp_path: Path) -> None:
    expected = reference[DEEPSEEK.name]
    results = run_ranks(4, lambda: train(DEEPSEEK, tmp_path, parallel), tmp_path, timeout_s=240)
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert result["mean_loss"] == pytest.approx(expected["mean_loss"], abs=1e-4)
    assert same_weights(tmp_path / "hf", expected["folder"])


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(data_parallel_shard=4), ParallelConfig(data_parallel_shard=4, expert_parallel=2)],
    ids=["shard4", "shard4-expert2"],
)
def test_more_ranks_than_experts(parallel: ParallelConfig, tmp_path: Path) -> None:
    """The router has a row an expert, so two of four ranks hold none of it; experts are then cut by features."""
    model = dataclasses.replace(UNTIED, num_experts=2)
    (tmp_path / "one").mkdir()
    expected = run_ranks(1, lambda: train(model, tmp_path / "one", ParallelConfig()), tmp_path / "one")[0]
    for result in run_ranks(4, lambda: train(model, tmp_path, parallel), tmp_path):
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert result["mean_loss"] == pytest.approx(expected["mean_loss"], abs=1e-4)
    assert same_weights(tmp_path / "hf", tmp_path / "one" / "hf")


def same_weights(ours: Path, theirs: Path) -> bool:
    """Whether two exported folders hold the same names and, within Adam's noise, the same numbers."""
    from safetensors.torch import load_file

    a, b = ({n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()} for folder in (ours, theirs))
    return a.keys() == b.keys() and all((a[n] - b[n]).abs().mean() < 1e-4 for n in a)
