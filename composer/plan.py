"""From a config to a plan: stages, processes, meshes, memory, ports, storage and exact commands. Pure.

A plan is data: `composer plan` prints it, `plan.yaml` in the run directory keeps it, `run.py` walks it. It knows
nothing of the machine it is made on, so a laptop plans for a cluster. Memory and storage are estimates; what they
leave out stands in `composer/models/sizes.py`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer.checks import check
from composer.checks.common import (
    data_parallel_ranks,
    generates,
    gpus_needed,
    optimizer_steps,
    rank_memory,
    world_size,
)
from composer.checks.tasks import check_tasks
from composer.config import PLAN_FILE, run_name, save_whole, to_dict
from composer.instantiate import accepts, check_targets
from composer.models.sizes import (
    count_parameters,
    generator_memory,
    sequence_multiple,
    training_flops_per_token,
)
from composer.production import ToolPlan, plan_tools
from composer.schema import Accelerator, Config, Dtype, PhaseKind, SourceConfig, SourceKind, Stage, SyncMethod
from composer.tracking.names import sqlite_uri

_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_CHECKPOINT_BYTES = 12
"""A float32 parameter and AdamW's two moments."""
_ROUTE_BYTES_SMALL, _ROUTE_BYTES_LARGE = 1, 2
"""Expert ids are uint8 up to 256 experts, uint16 beyond."""


@dataclass(frozen=True)
class SourcePlan:
    """A source of a phase."""

    name: str
    kind: str
    weight: float
    tokens: int
    """Its share of the phase's tokens."""
    where: str


@dataclass(frozen=True)
class PhasePlan:
    """A training phase: how many steps its token budget makes."""

    name: str
    kind: str
    seq_len: int
    batch_size: int
    sequences_per_rank: int
    steps: int
    tokens: int
    """The token budget in whole batches, `steps` x `batch_size` x `seq_len`. Kind pretrain trains on so many; kind sft
    on fewer, since a session shorter than `seq_len` counts as so many tokens, and not all of a session carries loss."""
    flops: float
    """Floating-point operations of all steps if so many tokens go through, recomputation left out."""
    sources: tuple[SourcePlan, ...]

    @property
    def is_bound(self) -> bool:
        """Whether `tokens` and `flops` are the most that there can be."""
        return self.kind == PhaseKind.sft


@dataclass(frozen=True)
class StagePlan:
    """One stage of the run."""

    stage: Stage
    steps: int
    """Optimizer steps; 0 for an evaluation."""
    episodes: int
    """Episodes of an evaluation or of all RL steps."""
    detail: str
    phases: tuple[PhasePlan, ...] = ()


@dataclass(frozen=True)
class ProcessPlan:
    """Processes of one role."""

    role: str
    count: int
    cpus: int
    """CPU seats of one process in Ray's scheduler."""
    gpus: int
    """GPUs of one process."""
    nodes: str
    target: str
    """The class it runs, or the command."""
    detail: str


@dataclass(frozen=True)
class MeshPlan:
    """The trainer's mesh. Dense parameters see the first five axes, experts the expert axis."""

    world_size: int
    replicate: int
    shard: int
    context: int
    tensor: int
    pipeline: int
    expert: int
    data_parallel_ranks: int
    sequence_multiple: int


@dataclass(frozen=True)
class MemoryLine:
    """An estimated part of memory, in bytes."""

    holder: str
    """trainer rank, generator GPU, or host."""
    part: str
    bytes: int


@dataclass(frozen=True)
class StorageLine:
    """An estimated size on disk or in shared memory, in bytes."""

    what: str
    where: str
    bytes: int


@dataclass(frozen=True)
class RunPlan:
    """Everything a run will start and need."""

    name: str
    accelerator: Accelerator
    parameters: int
    active_parameters: int
    stages: tuple[StagePlan, ...]
    processes: tuple[ProcessPlan, ...]
    mesh: MeshPlan
    num_nodes: int
    memory: tuple[MemoryLine, ...]
    storage: tuple[StorageLine, ...]
    tools: tuple[ToolPlan, ...]
    missing_tools: tuple[str, ...]
    """Of production, which the env does not have."""
    ports: dict[str, str]
    commands: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def resources(self) -> dict[str, int]:
        """CPU seats and GPUs that the launcher's Ray cluster must offer."""
        return {
            "CPU": sum(p.count * p.cpus for p in self.processes),
            "GPU": sum(p.count * p.gpus for p in self.processes),
        }

    def memory_bytes(self, holder: str) -> int:
        """Estimated memory of one trainer rank, generator GPU or host."""
        return sum(m.bytes for m in self.memory if m.holder == holder)


def make_plan(config: Config, typed: Sequence[str] = ()) -> RunPlan:
    """Check a config's relations and targets, and plan its run.

    Args:
        config: the resolved config.
        typed: flags and overrides as the user typed them, repeated in the exact commands.

    Raises:
        ConfigError: a target or the model is wrong.
        PlanError: the config cannot be run as it stands.
    """
    made = check_targets(config)
    check_tasks(config, made["env.taskset"], typed)
    warnings = check(config, typed)
    count, parallel = count_parameters(config.model), config.parallel
    return RunPlan(
        name=run_name(config),
        accelerator=parallel.accelerator,
        parameters=count.total,
        active_parameters=count.active,
        stages=tuple(_stages(config)),
        processes=tuple(_processes(config)),
        mesh=MeshPlan(
            world_size=world_size(parallel),
            replicate=parallel.data_parallel_replicate,
            shard=parallel.data_parallel_shard,
            context=parallel.context_parallel,
            tensor=parallel.tensor_parallel,
            pipeline=parallel.pipeline_parallel,
            expert=parallel.expert_parallel,
            data_parallel_ranks=data_parallel_ranks(parallel),
            sequence_multiple=sequence_multiple(config.model, parallel),
        ),
        num_nodes=_num_nodes(config),
        memory=tuple(_memory(config)),
        storage=tuple(_storage(config)),
        tools=plan_tools(config, made),
        missing_tools=tuple(config.env.missing_tools),
        ports=_ports(config),
        commands=tuple(_commands(config, typed)),
        warnings=tuple(warnings),
    )


def save(plan: RunPlan, run_dir: Path) -> Path:
    """Write a plan into a run directory.

    Raises:
        OSError: as `composer.config.save_whole`.
    """
    return save_whole({**to_dict(plan), "resources": plan.resources}, run_dir / PLAN_FILE)


def _num_nodes(config: Config) -> int:
    if config.parallel.num_nodes:
        return config.parallel.num_nodes
    return max(1, math.ceil(gpus_needed(config) / config.parallel.gpus_per_node))


def _stages(config: Config) -> Iterator[StagePlan]:
    a, e = config.algorithm, config.evaluation
    for stage in config.stages:
        if stage is Stage.pretrain:
            phases = tuple(_phases(config))
            bound = "at most " if any(p.is_bound for p in phases) else ""
            detail = f"{bound}{sum(p.tokens for p in phases):,} tokens"
            yield StagePlan(stage, sum(p.steps for p in phases), 0, detail, phases)
        elif stage is Stage.rl:
            per_step = a.groups_per_step * a.group_size
            detail = (
                f"{a.groups_per_step} groups of {a.group_size} a step, {a.advantage.value} advantage, {a.loss.value} "
                f"loss, staleness at most {a.max_staleness}"
            )
            yield StagePlan(stage, a.num_steps, a.num_steps * per_step, detail)
        else:
            detail = f"{e.num_tasks} unseen tasks, {e.samples_per_task} passes"
            yield StagePlan(stage, 0, e.num_tasks * e.samples_per_task, detail)


def _phases(config: Config) -> Iterator[PhasePlan]:
    ranks = data_parallel_ranks(config.parallel)
    for name, phase in config.mix.phases.items():
        steps = optimizer_steps(phase)
        tokens = steps * phase.batch_size * phase.seq_len
        weights = sum(s.weight for s in phase.sources.values())
        sources = [
            SourcePlan(n, s.kind.value, s.weight, round(tokens * s.weight / weights), _where(config, s))
            for n, s in phase.sources.items()
        ]
        yield PhasePlan(
            name=name,
            kind=phase.kind.value,
            seq_len=phase.seq_len,
            batch_size=phase.batch_size,
            sequences_per_rank=phase.batch_size // ranks,
            steps=steps,
            tokens=tokens,
            flops=training_flops_per_token(config.model, phase.seq_len) * tokens,
            sources=tuple(sources),
        )


def _where(config: Config, source: SourceConfig) -> str:
    """Where a source's text comes from."""
    if source.kind is SourceKind.sessions:
        sessions = config.mix.sessions
        right = f", right in {sessions.expert_accuracy:.0%}"
        told = accepts(config.env.taskset, "expert_accuracy", config.plugins, key="env.taskset")
        return f"{sessions.num_sessions:,} sessions of the expert{right if told else ''}"
    if source.kind is SourceKind.files:
        return f"{source.path}/{source.pattern}"
    return source.path or "Python's standard library"


def _processes(config: Config) -> Iterator[ProcessPlan]:
    parallel, generator, env = config.parallel, config.generator, config.env
    cuda = parallel.accelerator is Accelerator.cuda
    threads = parallel.threads_per_process
    yield ProcessPlan("driver", 1, 0, 0, "here", "composer", "controller, record of the run; talks to all others")
    if Stage.pretrain in config.stages or Stage.rl in config.stages:
        ranks = world_size(parallel)
        detail = f"{parallel.param_dtype.value}, " + (
            f"rank r on GPU r mod {parallel.gpus_per_node}" if cuda else f"{threads} thread(s)"
        )
        yield ProcessPlan("trainer", ranks, 1, int(cuda), _nodes(config, ranks), "composer.workers.TrainerRank", detail)
    if generates(config):
        gpus = generator.tensor_parallel if cuda else 0
        detail = f"vLLM, {generator.dtype.value}, TP {generator.tensor_parallel}, context {generator.max_model_len:,}"
        if gpus > parallel.gpus_per_node:
            detail += f", each on {gpus // parallel.gpus_per_node} machines"
        nodes = _nodes(config, generator.num_replicas * gpus)
        yield ProcessPlan(
            "generator", generator.num_replicas, 1, gpus, nodes, "composer.rollout.generator.Replica", detail
        )
    detail = f"{env.concurrency} sandboxes at a time each, at most {env.limits.memory_bytes / 2**20:.0f} MiB a sandbox"
    yield ProcessPlan("env", env.num_workers, 1, 0, "any", "composer.workers.EnvWorker", detail)


def _nodes(config: Config, gpus: int) -> str:
    """On how many machines so many GPUs are."""
    if config.parallel.accelerator is Accelerator.cpu:
        return "here"
    machines = math.ceil(gpus / config.parallel.gpus_per_node)
    return "1 machine" if machines == 1 else f"{machines} machines"


def _memory(config: Config) -> Iterator[MemoryLine]:
    cuda = config.parallel.accelerator is Accelerator.cuda
    count = count_parameters(config.model)
    if Stage.pretrain in config.stages or Stage.rl in config.stages:
        holder = "trainer rank"
        memory = rank_memory(config)
        yield MemoryLine(holder, "weights, float32 shard", memory.parameters)
        yield MemoryLine(holder, "gradients, float32 shard", memory.gradients)
        yield MemoryLine(holder, "AdamW moments, float32 shard", memory.optimizer)
        if memory.reference:
            yield MemoryLine(holder, "reference weights of the KL penalty, float32 shard", memory.reference)
        yield MemoryLine(holder, "gathered layers", memory.gathered)
        recomputed = "recomputed" if config.parallel.activation_checkpoint else "all kept"
        yield MemoryLine(holder, f"activations, {recomputed}", memory.activations)
        yield MemoryLine(holder, "logits, float32", memory.logits)
    if generates(config):
        holder = "generator GPU" if cuda else "generator process"
        memory = generator_memory(config.model, config.generator)
        yield MemoryLine(holder, f"weights, {config.generator.dtype.value}", memory.weights)
        yield MemoryLine(holder, f"KV cache, {memory.max_tokens:,} tokens", memory.kv_cache)
    ranks = world_size(config.parallel)
    per_host = min(ranks, config.parallel.gpus_per_node) if cuda else ranks
    yield MemoryLine(
        "trainer host", "checkpoint on its way to disk", _CHECKPOINT_BYTES * count.total * per_host // ranks
    )
    if Stage.rl in config.stages:
        yield MemoryLine("driver host", "samples of one step, at full length", _samples_bytes(config))
        yield MemoryLine("driver host", "expert ids of one step, at full length, if replayed", _routes_bytes(config))
    yield MemoryLine("env host", "sandboxes at their limit", config.env.concurrency * config.env.limits.memory_bytes)


def _samples_bytes(config: Config) -> int:
    """Token id, mask, log-probability and advantage of every position: 4 + 1 + 4 + 4 bytes."""
    a = config.algorithm
    return a.groups_per_step * a.group_size * config.generator.max_model_len * 13


def _routes_bytes(config: Config) -> int:
    a, model = config.algorithm, config.model
    width = _ROUTE_BYTES_SMALL if model.num_experts <= 256 else _ROUTE_BYTES_LARGE
    per_token = (model.num_layers - model.num_dense_layers) * model.experts_per_token * width
    return a.groups_per_step * a.group_size * config.generator.max_model_len * per_token


def _storage(config: Config) -> Iterator[StorageLine]:
    total, sync = count_parameters(config.model).total, config.weight_sync
    yield StorageLine("one checkpoint (weights and moments)", "run directory", _CHECKPOINT_BYTES * total)
    yield StorageLine("one Hugging Face export", "run directory", 4 * total)
    if Stage.rl in config.stages:
        shared = sync.method is SyncMethod.shared_memory
        where = sync.directory or ("/dev/shm" if shared else "run directory")
        version = _BYTES[config.generator.dtype] * total
        yield StorageLine("one version of the weights", where, version)
        yield StorageLine(
            f"{sync.keep_versions} versions and the one being written", where, (sync.keep_versions + 1) * version
        )


def _ports(config: Config) -> dict[str, str]:
    ports = {"trainer rendezvous": "a free port on the machine of rank 0, chosen at start"}
    if "address" in config.launcher.args:
        ports["Ray"] = f"{config.launcher.args['address']} (`ray start --head` listens on 6379)"
    else:
        ports["Ray"] = "free ports on this machine's loopback, chosen at start"
    if generates(config):
        ports["generators"] = "none: called as Ray actors"
    ports["MLflow"] = f"{config.tracking.uri}" if config.tracking.uri else "none: SQLite; 5000 for `mlflow ui`"
    return ports


def _commands(config: Config, typed: Sequence[str]) -> Iterator[str]:
    machines, parallel = _num_nodes(config), config.parallel
    if "address" in config.launcher.args:
        gpus = f" --num-gpus={parallel.gpus_per_node}" if parallel.accelerator is Accelerator.cuda else ""
        yield f"ray start --head --port=6379{gpus}   # on the first machine, unless the cluster is there already"
        if machines > 1:
            others = "the other one" if machines == 2 else f"each of the other {machines - 1}"
            yield f"ray start --address=<first machine>:6379{gpus}   # on {others}"
    yield shlex.join(("composer", *typed))
    uri = config.tracking.uri or sqlite_uri(Path(config.run_root).expanduser().absolute() / "mlflow.db")
    if uri.startswith("sqlite"):
        yield f"mlflow ui --backend-store-uri {shlex.quote(uri)} --host 127.0.0.1   # to look at the record"
