"""What the checks share: the sentence of a failed relation, and numbers that follow from the mesh. Pure."""

from __future__ import annotations

import math

from composer.errors import PlanError
from composer.models.sizes import TOKENS_AT_ONCE, TrainerMemory, rows_at_once, sequence_multiple, trainer_memory
from composer.schema import Accelerator, Config, ParallelConfig, PhaseConfig, PhaseKind, SourceKind, Stage


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


def optimizer_steps(phase: PhaseConfig) -> int:
    """Optimizer steps of a phase; the last batch is whole."""
    return math.ceil(phase.tokens / (phase.batch_size * phase.seq_len))


def largest_microbatch(config: Config) -> int:
    """Padded tokens of the largest forward and backward pass of one data-parallel rank, over all stages."""
    parallel, tokens = config.parallel, [rl_microbatch(config)]
    pipelined = parallel.pipeline_parallel > 1
    # Tensor parallelism takes multiples of its ranks: the trainer fills up with rows that carry no loss.
    ranks = parallel.tensor_parallel
    if Stage.pretrain in config.stages:
        for phase in config.mix.phases.values():
            length, mine = phase.seq_len, max(1, phase.batch_size // data_parallel_ranks(parallel))
            rows = min(mine, rows_at_once(length, pipelined))
            if phase.kind is PhaseKind.pretrain or pipelined:
                tokens.append(next_multiple(rows, ranks) * length)
            else:  # rows are as long as a step's sessions: the shorter, the more of them at once
                tokens.append(max(rows * length, min(mine * length, TOKENS_AT_ONCE)) + (ranks - 1) * length)
    return max(tokens)


def rl_microbatch(config: Config) -> int:
    """The same in RL alone; 0 without it."""
    if Stage.rl not in config.stages:
        return 0
    row = next_multiple(config.generator.max_model_len, sequence_multiple(config.model, config.parallel))
    return config.algorithm.microbatch_tokens + (config.parallel.tensor_parallel - 1) * row


def keeps_reference(config: Config) -> bool:
    """Whether the trainer keeps the weights that RL starts from, for a KL penalty."""
    return Stage.rl in config.stages and config.algorithm.kl_coefficient > 0


def rank_memory(config: Config) -> TrainerMemory:
    """What one trainer rank holds at the peak of the run."""
    tokens, rl_tokens = largest_microbatch(config), rl_microbatch(config)
    return trainer_memory(config.model, config.parallel, tokens, keeps_reference(config), rl_tokens)


def gpus_needed(config: Config) -> int:
    """GPUs of trainer and generators together; 0 on the CPU."""
    if config.parallel.accelerator is Accelerator.cpu:
        return 0
    generators = config.generator.num_replicas * config.generator.tensor_parallel if generates(config) else 0
    return world_size(config.parallel) + generators


def wants_sessions(config: Config) -> bool:
    """Whether a phase that is to be trained reads the scripted expert's sessions."""
    phases = config.mix.phases.values() if Stage.pretrain in config.stages else ()
    return any(source.kind is SourceKind.sessions for phase in phases for source in phase.sources.values())


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
