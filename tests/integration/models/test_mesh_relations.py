"""The plan and the trainer agree on which meshes can be: what one refuses, the other does, and the rest trains."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from composer.checks.mesh import check_mesh
from composer.compose import compose
from composer.errors import ConfigError, PlanError
from composer.models.base import check_model
from composer.models.sizes import sequence_multiple
from composer.schema import Dtype, ModelConfig, ParallelConfig
from tests.integration.models.ranks import run_ranks
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")

UNTIED = dataclasses.replace(QWEN, tie_embeddings=False)


def with_model(**changes: Any) -> ModelConfig:
    return dataclasses.replace(UNTIED, **changes)


def check(model: ModelConfig, parallel: ParallelConfig) -> None:
    check_mesh(dataclasses.replace(compose(), model=model, parallel=parallel))


def train(model: ModelConfig, parallel: ParallelConfig, folder: Path) -> float:
    """Build the trainer in as many processes as the mesh has, and take one step; the loss."""
    p, pipelined = parallel, parallel.pipeline_parallel > 1
    world = p.data_parallel_replicate * p.data_parallel_shard * p.context_parallel * p.tensor_parallel
    world *= p.pipeline_parallel

    def step() -> float:
        trainer = build(model, folder, parallel, pipeline_microbatches=3 if pipelined else 1)
        loss = trainer.update([batch(i, rows=1) for i in range(3)] if pipelined else [batch(0)])["loss"]
        trainer.close()
        return loss

    return run_ranks(world, step, folder)[0]


@pytest.mark.parametrize(
    ("model", "parallel", "key", "reason"),
    [
        (QWEN, ParallelConfig(pipeline_parallel=2), "parallel.pipeline_parallel", "Weight tying is not supported"),
        (
            with_model(num_layers=3),
            ParallelConfig(pipeline_parallel=3, context_parallel=2),
            "parallel.pipeline_parallel",
            "list index out of range|onnection|Broken pipe",  # the other stages may fail first, at its closed sockets
        ),
        (with_model(max_context=130), ParallelConfig(context_parallel=2), "model.max_context", "divisible by 4"),
        (with_model(max_context=129), ParallelConfig(tensor_parallel=2), "model.max_context", "divisible by 2"),
        (with_model(expert_ffn_size=36), ParallelConfig(tensor_parallel=2), "model.expert_ffn_size", "16 bytes"),
        (with_model(hidden_size=66), ParallelConfig(), "model.hidden_size", "16 bytes"),
        (
            with_model(hidden_size=68),
            ParallelConfig(param_dtype=Dtype.bfloat16),
            "model.hidden_size",
            "16 bytes",
        ),
        (
            with_model(num_experts=2),
            ParallelConfig(data_parallel_shard=3),
            "parallel.data_parallel_shard",
            "uneven sharding",
        ),
        (with_model(max_context=129), ParallelConfig(tensor_parallel=3), "parallel.tensor_parallel", "must divide"),
    ],
)
def test_both_refuse(model: ModelConfig, parallel: ParallelConfig, key: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        check(model, parallel)
    assert refused.value.key == key
    with pytest.raises(AssertionError, match=reason):  # the traceback of the first rank
        train(model, parallel, tmp_path)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (with_model(num_layers=3), ParallelConfig(pipeline_parallel=3)),  # the last stage holds no layer
        (with_model(num_layers=4), ParallelConfig(pipeline_parallel=3, context_parallel=2)),
        (with_model(max_context=132), ParallelConfig(context_parallel=2)),
        (with_model(expert_ffn_size=36), ParallelConfig(tensor_parallel=2, expert_parallel=2)),
        (with_model(num_experts=2), ParallelConfig(data_parallel_shard=4, tensor_parallel=2)),
        (with_model(num_experts=2), ParallelConfig(data_parallel_replicate=3)),
        (QWEN, ParallelConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=4)),
    ],
)
def test_both_take(model: ModelConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    check(model, parallel)
    assert 5 < train(model, parallel, tmp_path) < 8  # random weights: about ln 512 = 6.2


def test_groups_of_one_expert(tmp_path: Path) -> None:
    model = dataclasses.replace(DEEPSEEK, router_groups=8, router_groups_used=4)
    with pytest.raises(ConfigError, match="a group holds two experts or more: at most 4"):
        check_model(model)
    with pytest.raises(AssertionError, match="must be >= 2"):
        train(model, ParallelConfig(), tmp_path)


def test_a_large_vocabulary_cuts_rows(tmp_path: Path) -> None:
    model = with_model(vocab_size=32768)
    assert sequence_multiple(model, ParallelConfig()) == 8
    trainer = build(model, tmp_path)
    assert trainer.update([batch(0, rows=1, length=24)])["loss"] == pytest.approx(10.4, abs=1)  # ln 32768
    with pytest.raises(RuntimeError, match="divisible by num_chunks"):
        trainer.update([batch(0, rows=1, length=28)])
    trainer.close()
