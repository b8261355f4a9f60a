"""What the checks share: the sentence of a failed relation, and numbers that follow from the mesh. Pure."""

from __future__ import annotations

import math

from composer.errors import PlanError
from composer.schema import Accelerator, Config, ParallelConfig, PhaseConfig, Stage


def require(ok: bool, key: str, value: object, remedy: str) -> None:
    """Refuse a plan in which a relation between keys does not hold.

    Raises:
        PlanError: `ok` is false.
    """
    if not ok:
        raise PlanError(key, value, remedy)


def world_size(parallel: ParallelConfig) -> int:
    """Ranks of the trainer: replicate x shard x context x tensor x pipeline."""
    return (
        parallel.data_parallel_replicate
        * parallel.data_parallel_shard
        * parallel.context_parallel
        * parallel.tensor_parallel
        * parallel.pipeline_parallel
    )


def data_parallel_ranks(parallel: ParallelConfig) -> int:
    """Ranks that see different sequences."""
    return parallel.data_parallel_replicate * parallel.data_parallel_shard


def sequence_multiple(parallel: ParallelConfig) -> int:
    """What a sequence length must be divisible by: CP cuts into 2 x CP chunks, sequence parallelism into TP."""
    context = 2 * parallel.context_parallel if parallel.context_parallel > 1 else 1
    return context * parallel.tensor_parallel


def optimizer_steps(phase: PhaseConfig) -> int:
    """Optimizer steps of a phase; the last batch is whole."""
    return math.ceil(phase.tokens / (phase.batch_size * phase.seq_len))


def largest_microbatch(config: Config) -> int:
    """Padded tokens that go through the model at once on one data-parallel rank, over all stages."""
    tokens = [p.seq_len for p in config.mix.phases.values()] if Stage.pretrain in config.stages else []
    if Stage.rl in config.stages:
        tokens.append(config.algorithm.microbatch_tokens)
    return max(tokens, default=0)


def gpus_needed(config: Config) -> int:
    """GPUs of trainer and generators together; 0 on the CPU."""
    if config.parallel.accelerator is Accelerator.cpu:
        return 0
    generators = config.generator.num_replicas * config.generator.tensor_parallel if generates(config) else 0
    return world_size(config.parallel) + generators


def generates(config: Config) -> bool:
    """Whether any stage runs episodes."""
    return any(s is not Stage.pretrain for s in config.stages)


def divisors(number: int) -> str:
    """The divisors of a number, as a hint (at most ten)."""
    found = [str(d) for d in range(1, min(number, 1024) + 1) if number % d == 0]
    return "use " + ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")


def next_multiple(number: int, multiple: int) -> int:
    """The smallest multiple that is at least `number`."""
    return math.ceil(number / multiple) * multiple
