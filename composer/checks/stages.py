"""Checks of the stages, the phases of the mix, the RL step and the env."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

from composer.checks.common import (
    data_parallel_ranks,
    generates,
    next_multiple,
    optimizer_steps,
    require,
)
from composer.errors import PlanError
from composer.instantiate import GIVEN, check_target
from composer.models.sizes import sequence_multiple
from composer.monitor.policy import check_monitor
from composer.schema import Config, PhaseConfig, PhaseKind, SourceConfig, SourceKind, Stage


def check_stages(config: Config) -> None:
    """The stages are in order, and there is something for each to work on.

    Raises:
        PlanError: the first relation that does not hold.
    """
    stages, order = config.stages, list(Stage)
    names = [s.value for s in stages]
    require(bool(stages), "stages", names, f"name at least one of {', '.join(order)}")
    require(len(set(stages)) == len(stages), "stages", names, "a stage stands twice: name each once")
    in_order = sorted(stages, key=order.index)
    require(stages == in_order, "stages", names, f"stages run in this order: [{', '.join(in_order)}]")
    require(
        Stage.pretrain not in stages or bool(config.mix.phases),
        "mix.phases",
        {},
        "the pretrain stage needs at least one phase: choose a `mix`, or leave `pretrain` out of `stages`",
    )
    require(
        Stage.pretrain in stages or config.model.checkpoint is not None,
        "model.checkpoint",
        None,
        "without the pretrain stage there is nothing to start from: give a Hugging Face folder, or add `pretrain` to "
        "`stages`",
    )


def check_phases(config: Config) -> None:
    """Each phase's sequences and batches fit the mesh, and its sources what it does.

    Raises:
        PlanError: the first relation that does not hold; its notes are those of the other phases, since a change of the
            mesh mostly asks the same of all.
    """
    if Stage.pretrain not in config.stages:
        return
    errors = []
    for name, phase in config.mix.phases.items():
        try:
            _check_phase(config, f"mix.phases.{name}", phase)
        except PlanError as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(str(other))
        raise errors[0]
    codebase = config.mix.codebase
    require(
        codebase.kind is not SourceKind.sessions,
        "mix.codebase.kind",
        codebase.kind.value,
        "the codebase is held-out text: use files, jsonl, stdlib_code or stdlib_prose",
    )
    weight, remedy = codebase.weight, "nothing reads it, since the codebase is in no mix: leave it at 1"
    require(weight == 1, "mix.codebase.weight", weight, remedy)
    _check_source("mix.codebase", codebase, PhaseKind.pretrain)


def _check_phase(config: Config, key: str, phase: PhaseConfig) -> None:
    p, ranks = config.parallel, data_parallel_ranks(config.parallel)
    multiple, limit = sequence_multiple(config.model, p), config.model.max_context
    require(phase.seq_len <= limit, f"{key}.seq_len", phase.seq_len, f"must be at most model.max_context ({limit})")
    require(
        phase.seq_len % multiple == 0,
        f"{key}.seq_len",
        phase.seq_len,
        f"must be a multiple of {multiple}, by which context and tensor parallelism and the loss of a large "
        f"vocabulary cut it, such as {next_multiple(phase.seq_len, multiple)}",
    )
    require(
        phase.batch_size % ranks == 0,
        f"{key}.batch_size",
        phase.batch_size,
        f"must be a multiple of the {ranks} data-parallel ranks, such as {next_multiple(phase.batch_size, ranks)}",
    )
    require(
        phase.batch_size // ranks >= p.pipeline_parallel,
        f"{key}.batch_size",
        phase.batch_size,
        f"a pipeline of {p.pipeline_parallel} stages needs as many sequences on each of {ranks} data-parallel "
        f"ranks: at least {ranks * p.pipeline_parallel}",
    )
    steps = optimizer_steps(phase)
    require(
        phase.warmup_steps < steps or phase.warmup_steps == 0,
        f"{key}.warmup_steps",
        phase.warmup_steps,
        f"must be less than the phase's {steps} steps (tokens / batch_size / seq_len)",
    )
    require(bool(phase.sources), f"{key}.sources", {}, "a phase needs at least one source")
    require(
        phase.kind is PhaseKind.pretrain or len(phase.sources) == 1,
        f"{key}.sources",
        list(phase.sources),
        "all sessions are one pool (mix.sessions): keep one source",
    )
    for source_name, source in phase.sources.items():
        _check_source(f"{key}.sources.{source_name}", source, phase.kind)


def _check_source(key: str, source: SourceConfig, kind: PhaseKind) -> None:
    sessions = source.kind is SourceKind.sessions
    if kind is PhaseKind.sft:
        require(sessions, f"{key}.kind", source.kind.value, "a phase of kind sft reads sessions: write `sessions`")
    else:
        require(not sessions, f"{key}.kind", source.kind.value, "sessions are for a phase of kind sft")
    below = not source.pattern.startswith("/") and ".." not in Path(source.pattern).parts
    require(below, f"{key}.pattern", source.pattern, "give a pattern below the path, such as '**/*.py'")
    globs = all(part == "**" or "**" not in part for part in Path(source.pattern).parts) and "\0" not in source.pattern
    require(globs, f"{key}.pattern", source.pattern, "`**` stands for whole folders only: write '**/*.py'")
    if source.kind in (SourceKind.files, SourceKind.jsonl):
        what = "a folder" if source.kind is SourceKind.files else "a file of JSON lines"
        require(bool(source.path), f"{key}.path", source.path, f"kind {source.kind.value} needs {what}: give its path")


def check_rl(config: Config) -> None:
    """A step gives every rank something to do, and an episode fits a micro-batch.

    Raises:
        PlanError: the first relation that does not hold.
    """
    if Stage.rl not in config.stages:
        return
    a, p, ranks = config.algorithm, config.parallel, data_parallel_ranks(config.parallel)
    episode = next_multiple(config.generator.max_model_len, sequence_multiple(config.model, p))
    require(
        a.microbatch_tokens >= episode,
        "algorithm.microbatch_tokens",
        a.microbatch_tokens,
        f"must hold one episode of generator.max_model_len, padded: at least {episode}",
    )
    episodes = a.groups_per_step * a.group_size
    require(
        episodes >= ranks,
        "algorithm.groups_per_step",
        a.groups_per_step,
        f"{episodes} episodes a step leave some of {ranks} data-parallel ranks without any: at least "
        f"{math.ceil(ranks / a.group_size)} groups",
    )
    require(
        p.pipeline_parallel == 1,
        "parallel.pipeline_parallel",
        p.pipeline_parallel,
        "the RL loss does not run under pipeline parallelism: use 1 (context or expert parallelism save memory too)",
    )
    key = "algorithm.warmup_steps"
    require(
        a.warmup_steps < a.num_steps or a.warmup_steps == 0,
        key,
        a.warmup_steps,
        f"must be less than algorithm.num_steps ({a.num_steps})",
    )
    require(
        a.min_start_average == 0 or Stage.evaluate_before in config.stages,
        "algorithm.min_start_average",
        a.min_start_average,
        "needs the stage evaluate_before, which measures it: add it to `stages`, or set 0",
    )


def check_env(config: Config) -> None:
    """An episode has tools and a rubric, the monitor knows what it is told of, and the deadlines nest.

    Raises:
        ConfigError: the monitor has no such rule or kind, or its judge cannot be asked.
        PlanError: the first relation that does not hold.
    """
    env = config.env
    if not generates(config):
        return
    _check_agent(config)
    require(bool(env.graders), "env.graders", {}, "a rubric needs at least one grader")
    check_monitor(env.monitor)
    for name in env.grader_weights:
        require(
            name in env.graders,
            f"env.grader_weights.{name}",
            env.grader_weights[name],
            f"no such grader; the graders are {', '.join(env.graders)}",
        )
    weights = [env.grader_weights.get(name, 1.0) for name in env.graders]
    require(any(weights), "env.grader_weights", env.grader_weights, "all graders weigh 0: every reward would be 0")
    require(
        env.episode_timeout_s <= env.limits.lifetime_s,
        "env.limits.lifetime_s",
        env.limits.lifetime_s,
        f"a sandbox must outlive its episode: at least env.episode_timeout_s ({env.episode_timeout_s:g})",
    )
    limits, most = env.limits, env.limits.memory_bytes // 2
    backend = check_target(env.sandbox, config.plugins, key="env.sandbox", given=GIVEN["env.sandbox"])
    require(
        limits.disk_bytes <= most or not getattr(backend, "files_in_memory", False),
        "env.limits.disk_bytes",
        limits.disk_bytes,
        f"files lie in memory, with what runs: at most half of env.limits.memory_bytes ({limits.memory_bytes}), {most}",
    )
    key = "algorithm.group_timeout_s"
    timeout = config.algorithm.group_timeout_s
    require(
        env.episode_timeout_s <= timeout or Stage.rl not in config.stages,
        key,
        timeout,
        f"a group must outlive its episodes: at least env.episode_timeout_s ({env.episode_timeout_s:g})",
    )


def _check_agent(config: Config) -> None:
    """Who plays: an agent program, whose prompts and tools are its own, or the product's own harness, which has tools.

    Raises:
        PlanError: the first relation that does not hold.
    """
    env, agent = config.env, config.env.agent
    if not agent.command:
        require(bool(env.tools), "env.tools", {}, "an episode needs at least one tool")
        for name in ("environment", "files"):
            value = getattr(agent, name)
            require(not value, f"env.agent.{name}", value, "is the agent program's: give env.agent.command too")
        return
    for name, file in agent.files.items():
        key = f"env.agent.files.{name}.path"
        require(PurePosixPath(file.path).is_absolute(), key, file.path, "must be an absolute path in the sandbox")
    remedy = "an agent program writes its own prompts (env.agent.command): leave it at its default"
    require(not env.prompt_dropout, "env.prompt_dropout", env.prompt_dropout, remedy)
    no_prompt = config.evaluation.no_prompt
    require(not no_prompt, "evaluation.no_prompt", no_prompt, remedy)
