"""A sweep: every job is checked before the first starts, then Hydra's sweeper and launcher run them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from composer import config as config_files
from composer.binding import bind
from composer.compose import HydraSession, directory
from composer.errors import ComposerError, ConfigError
from composer.explain import parse
from composer.jobs import INTERRUPTED, execute, quoted, show_plan, typed, unused_removed
from composer.plan import make_plan
from composer.rundir import check_free, claim
from composer.schema import Config
from composer.shell import as_typed
from composer.streams import say


def run_sweep(session: HydraSession, command: str, overrides: list[str]) -> int:
    """Check every job before the first starts, then hand over to Hydra's sweeper and launcher."""
    cfg = session.raw(overrides, RunMode.MULTIRUN)
    hydras = [o for o in overrides if o.lstrip("+~").startswith(("hydra.", "hydra/"))]
    places = {os.curdir: "the sweep"}
    jobs: list[tuple[str, list[str]]] = []
    earlier: list[tuple[Config, list[str]]] = []
    for number, job in enumerate(_jobs(session, cfg, overrides)):
        composed = session.compose([*hydras, *job])
        _check_new(composed.config, job, earlier)
        place = os.path.normpath(_subdirectory(composed.hydra, cfg, number))
        if place in places:
            remedy = f"{places[place]} and job {number} would share this directory: put ${{hydra.job.num}} into it"
            raise ConfigError("hydra.sweep.subdir", place, remedy)
        places[place] = f"job {number}"
        jobs.append((place, job))
        plan = make_plan(composed.config, typed(composed.hydra, job))
        if command == "plan":
            say(f"\njob {number}: {' '.join(map(as_typed, job))}")
            show_plan(plan)
    HydraConfig.instance().set_config(cfg)
    wanted, chosen_as = directory(cfg.hydra, "hydra.sweep.dir")
    check_free(wanted, chosen_as=chosen_as)
    if command == "plan":
        return 0
    sweep_dir = claim(wanted, chosen_as=chosen_as)
    kept = [o for o in overrides if not o.startswith(("hydra.sweep.dir=", "hydra.mode="))]
    where = [f"hydra.sweep.dir={quoted(str(sweep_dir))}", "hydra.mode=MULTIRUN"]
    try:
        session.hydra.multirun(session.config_name, sweep_job, [*kept, *where])
    except KeyboardInterrupt:
        _say_what_is_left(sweep_dir, jobs)
        with contextlib.suppress(OSError):
            sweep_dir.rmdir()  # if nothing is in it yet
        raise
    except HydraException as error:
        raise ConfigError("hydra.sweeper", str(cfg.hydra.sweeper._target_), " ".join(str(error).split())) from error
    return 0


def _say_what_is_left(sweep_dir: Path, jobs: Sequence[tuple[str, list[str]]]) -> None:
    """Name the jobs that an interrupted sweep did not come to, which have no directory to resume."""
    left = [
        f"job {number} ({' '.join(map(as_typed, job))})"
        for number, (place, job) in enumerate(jobs)
        if not (sweep_dir / place / config_files.PLAN_FILE).exists()
    ]
    if left:
        say(f"composer: of the {len(jobs)} jobs of this sweep these were not begun: {', '.join(left)}", sys.stderr)


def _check_new(config: Config, job: list[str], earlier: list[tuple[Config, list[str]]]) -> None:
    """Add a job to the `earlier` ones.

    Raises:
        ConfigError: it is one of them: whoever lists a value twice believes that it makes two runs.
    """
    for number, (known, as_job) in enumerate(earlier):
        if known == config:
            remedy = f"job {len(earlier)} would be job {number} again ({' '.join(map(as_typed, as_job))})"
            value = " ".join(map(as_typed, job))
            raise ConfigError("-m", value, f"{remedy}: list each value once; to repeat a run, sweep over `seed`")
    earlier.append((config, job))


def _jobs(session: HydraSession, cfg: DictConfig, overrides: list[str]) -> list[list[str]]:
    """The overrides of each job, where they are known beforehand (Hydra's basic sweeper)."""
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return []
    listed = [f"{k}={v}" for k, v in (cfg.hydra.sweeper.get("params") or {}).items()]
    task = [o for o in overrides if not o.lstrip("+~").startswith(("hydra.", "hydra/"))]
    parsed = parse([*listed, *task], session.hydra.config_loader)
    try:
        [jobs] = BasicSweeper.split_arguments(parsed, None)
    except (HydraException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("-m", " ".join(task), f"{reason}: list the values, `<key>=a,b`") from None
    if not jobs:
        raise ConfigError("-m", " ".join(task), "makes no job: a range or list of values is empty, fill it")
    return [list(job) for job in jobs]


def _subdirectory(hydra: DictConfig, sweep: DictConfig, number: int) -> str:
    """Where Hydra's launcher will put a job, below the sweep's directory."""
    job = hydra._get_root()
    assert isinstance(job, DictConfig)
    OmegaConf.copy_cache(from_config=sweep, to_config=job)  # as the launcher does: one `${now:…}` for all jobs
    with read_write(hydra), open_dict(hydra):
        hydra.job.num, hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(job)
    return str(directory(hydra, "hydra.sweep.subdir")[0])


def sweep_job(cfg: DictConfig) -> float | None:
    """One job of a sweep, in whatever process Hydra's launcher runs it.

    Returns:
        average@k after RL, for sweepers that optimise; None if the job has no such evaluation.

    Raises:
        ComposerError: the job failed.
        KeyboardInterrupt: it was interrupted, and so is the sweep.
    """
    hydra = HydraConfig.get()
    data = OmegaConf.to_container(cfg, resolve=True)
    config = config_files.anchored(bind(Config, data if isinstance(data, dict) else {}))
    run_dir = Path(str(hydra.runtime.output_dir))
    if (run_dir / config_files.CONFIG_FILE).exists():
        raise ConfigError(
            "hydra.sweep.subdir", str(run_dir), "two jobs share this directory: put ${hydra.job.num} into it"
        )
    with unused_removed(run_dir):
        code = execute(config, make_plan(config, typed(hydra, hydra.overrides.task)), run_dir)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ComposerError(f"the job in {run_dir} ended with exit code {code}: see composer.log there")
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return float(summary["evaluation"]["after"][f"average_at_{config.evaluation.samples_per_task}"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
