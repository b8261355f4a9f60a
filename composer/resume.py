"""Continue a run: its own config, plus the few changes that cannot alter what is learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from composer.compose import apply
from composer.config import anchored, differences, load
from composer.errors import ConfigError, ResumeError
from composer.rundir import RunDirectory, find_plugins
from composer.schema import Config

SAFE = (
    "tracking.uri",
    "tracking.system_metrics_every_s",
    "tracking.traces_per_step",
    "tracking.timeout_s",
    "env.concurrency",
    "env.episode_timeout_s",
    "env.checkpoint_turns",
    "env.kept_states",
    "env.pool",
    "env.limits.lifetime_s",
    "evaluation.timeout_s",
    "algorithm.group_timeout_s",
    "algorithm.checkpoint_every",
    "generator.max_num_seqs",
    "generator.kv_cache_bytes",
    "generator.gpu_memory_utilization",
    "generator.request_timeout_s",
    "generator.start_timeout_s",
    "algorithm.min_start_average",
    "weight_sync",
    "parallel.threads_per_process",
    "parallel.timeout_s",
    "launcher.args",
    "env.sandbox.args",
)
"""Keys (and everything below them) that may change when a run is resumed: deadlines, speed, memory and the record.

None of them is meant to change what is learnt, though timing decides which episodes end up in which step.
"""
_SAFE_PHASE_KEYS = ("evaluate_every", "checkpoint_every")


def resumed(run_dir: Path, overrides: Sequence[str], *, starts: bool = True) -> tuple[Config, list[str]]:
    """The config to continue a run with, and a line for each key that differs from before.

    Args:
        run_dir: the directory of the run.
        overrides: what was typed beside `resume=`.
        starts: the run is to go on, which a live or a finished one cannot.

    Raises:
        ResumeError: the directory cannot be resumed, or an override would make it another run.
        ConfigError: an override is wrong in itself.
    """
    RunDirectory(run_dir).check_resumable(starts=starts)
    try:
        stored = load(run_dir)
    except ConfigError as error:
        raise outdated(run_dir, error) from None
    if stored.plugins:
        find_plugins(run_dir)
    groups = [o for o in overrides if _is_group(o)]
    if groups:
        raise ResumeError(
            f"resume={run_dir}: `{groups[0]}` changes a whole group; beside `resume` give single keys, such "
            "as tracking.uri=..."
        )
    wanted = anchored(apply(stored, overrides))
    lines = []
    for key, old, new in differences(stored, wanted):
        if not _is_safe(key):
            raise ResumeError(
                f"resume={run_dir}: `{key}` was {old!r} and cannot become {new!r} in the middle of a run: "
                "leave it out, or start a new run"
            )
        lines.append(f"{key}: {old!r} -> {new!r}")
    return dataclasses.replace(wanted, resume=str(run_dir)), lines


def outdated(run_dir: Path, error: ConfigError) -> ResumeError:
    """What is wrong with the config of a run itself, which nobody can change any more."""
    instead = f"give another `{error.key}`, or " if _is_safe(error.key) else ""
    return ResumeError(
        f"resume={run_dir}: its config no longer fits this version of the product ({error}); {instead}resume it with "
        "the version that started it"
    )


def _is_group(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+~")
    names = {f.name for f in dataclasses.fields(Config) if f.name not in ("seed", "run_root", "plugins", "stages")}
    return "/" in key or "@" in key or key in names | {"experiment"}


def _is_safe(key: str) -> bool:
    if key.startswith("mix.phases."):
        return key.rpartition(".")[2] in _SAFE_PHASE_KEYS
    return any(key == safe or key.startswith(f"{safe}.") for safe in SAFE)
