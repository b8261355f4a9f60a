"""What a composed config becomes: one run in a directory of its own, new or resumed.

config -> plan -> directory -> Hydra's logging around `composer.run`, with the lock held and the status kept.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from composer import config as config_files
from composer.compose import HydraSession, directory
from composer.errors import ComposerError, ConfigError, MachineError, ResumeError, is_disk_full
from composer.interrupts import no_lost_interrupt
from composer.plan import RunPlan, make_plan
from composer.plan import save as save_plan
from composer.pretrain.mix import look_at_sources
from composer.resume import outdated, resumed
from composer.rundir import RunDirectory, Status, check_free, claim, remove_unused
from composer.schema import Config
from composer.shell import as_typed, pasteable
from composer.streams import answering, say

INTERRUPTED = 130
log = logging.getLogger(__name__)


def run_single(session: HydraSession, command: str, overrides: list[str]) -> int:
    """Run one job, or show its plan if that is the `command`; returns the exit code."""
    composed = session.compose(overrides)
    plan = make_plan(composed.config, typed(composed.hydra, overrides))
    wanted, chosen_as = directory(composed.hydra, "hydra.run.dir")
    check_free(wanted, chosen_as=chosen_as)
    if command == "plan":
        return show_plan(plan)
    keep = chosen_as is not None and wanted.exists()
    config = config_files.anchored(composed.config)
    run_dir = claim(wanted, chosen_as=chosen_as)
    with unused_removed(run_dir, keep=keep):
        return _through_hydra(session, overrides, run_dir, lambda: execute(config, plan, run_dir))


def run_resumed(session: HydraSession, command: str, folder: str, overrides: list[str], *, multirun: bool) -> int:
    """Go on with the run in `folder`, or show the plan of that; returns the exit code."""
    run_dir = Path(folder).expanduser().absolute()
    if multirun:
        raise ResumeError(f"resume={run_dir}: one run is resumed at a time: leave out -m")
    others = [o for o in overrides if not o.lstrip("+~").startswith(("resume=", "hydra.", "hydra/"))]
    config, changes = resumed(run_dir, others, starts=command == "run")
    plan = _plan_resumed(config, run_dir, others, [line.partition(": ")[0] for line in changes])
    does = "resuming" if command == "run" else "plan of"
    say(f"{does} {run_dir}; " + ("differs from before:" if changes else "nothing differs from before"))
    for change in changes:
        say(f"  {change}")
    if command == "plan":
        return show_plan(plan)

    def job() -> int:
        log.info("resumed; %s", "; ".join(changes) or "nothing differs")
        return execute(config, plan, run_dir)

    ours = [o for o in overrides if o.startswith(("hydra.", "hydra/"))]
    return _through_hydra(session, [*ours, "hydra.output_subdir=null"], run_dir, job)


def _plan_resumed(config: Config, run_dir: Path, overrides: Sequence[str], changed: Sequence[str]) -> RunPlan:
    """The plan of a run that goes on.

    Raises:
        ResumeError: the run's own config cannot be planned by this version.
        ConfigError: what was typed is wrong.
    """
    this = f"resume={run_dir}"
    typed = [o for o in overrides if any(f"{k}.".startswith(f"{o.partition('=')[0].lstrip('+~')}.") for k in changed)]
    try:
        return make_plan(config, (this, *map(as_typed, typed)))
    except ConfigError as error:
        if error.key in changed:
            raise
        try:
            make_plan(replace(config_files.load(run_dir), resume=str(run_dir)), (this,))
        except ConfigError as own:
            raise outdated(run_dir, own) from None
        raise


def execute(config: Config, plan: RunPlan, run_dir: Path) -> int:
    """Run a plan in its directory, holding the lock and keeping the status."""
    directory = RunDirectory(run_dir)
    with directory.lock():
        plan = replace(plan, warnings=(*plan.warnings, *look_at_sources(config)))
        try:
            config_files.save(config, run_dir)
            save_plan(plan, run_dir)
        except OSError as error:
            raise MachineError(
                f"{run_dir} cannot be written ({error.strerror}): free space, or change run_root"
            ) from None
        say(f"run directory: {run_dir}")
        for warning in plan.warnings:
            say(f"note: {warning}")
        directory.set_status(Status.running)
        status = Status.failed
        try:
            with no_lost_interrupt():
                from composer.run import run

            code = run(config, plan, run_dir)
            status = {0: Status.finished, INTERRUPTED: Status.interrupted}.get(code, Status.failed)
        except KeyboardInterrupt:
            status = Status.interrupted
            raise
        except Exception as cause:
            error = cause
            if is_disk_full(cause) and not isinstance(cause, ComposerError):
                error = MachineError(f"the disk is full: {run_dir} could not be written; free space and resume")
            directory.note_what_is_left(error)
            raise error from cause.__cause__
        finally:
            directory.set_status(status)
    return code


@contextlib.contextmanager
def unused_removed(run_dir: Path, *, keep: bool = False) -> Iterator[None]:
    """Around the start of a run: one that was refused or interrupted before it began anything leaves no directory."""
    gone = f"{run_dir} is {'empty again' if keep else 'removed'}"
    try:
        yield
    except ComposerError as error:
        if remove_unused(run_dir, keep=keep):
            error.add_note(f"nothing was begun; {gone}")
        raise
    except KeyboardInterrupt:
        if remove_unused(run_dir, keep=keep):
            say(f"composer: interrupted before anything was begun; {gone}", sys.stderr)
        else:
            resume = pasteable("composer", f"resume={run_dir}")
            say(f"composer: interrupted; continue with: {resume}", sys.stderr)
        raise


def _through_hydra(session: HydraSession, overrides: list[str], run_dir: Path, job: Callable[[], int]) -> int:
    """Let Hydra set up logging and write `.hydra/`, then run the job; its error comes out as it was raised."""
    outcome: list[Any] = []

    def task(cfg: DictConfig) -> None:
        try:
            outcome.append(job())
        except BaseException as error:
            outcome.append(error)

    where = f"hydra.run.dir={quoted(str(run_dir))}"
    kept = [o for o in overrides if not o.startswith(("hydra.run.dir=", "hydra.mode="))]
    try:
        session.hydra.run(session.config_name, task, [*kept, where, "hydra.mode=RUN"])
    except (OmegaConfBaseException, ValueError) as error:  # Of Hydra's own keys: the job's errors are in `outcome`.
        remedy = f"{' '.join(str(error).split())}; `composer --cfg hydra` shows what stands there"
        raise ConfigError("hydra", " ".join(o for o in overrides if "hydra" in o), remedy) from None
    except OSError as error:  # Of Hydra's own files.
        raise MachineError(f"{run_dir} cannot be written ({error.strerror}): free space, or change run_root") from None
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def typed(hydra: DictConfig | HydraConf, overrides: Sequence[str]) -> tuple[str, ...]:
    """The words with which this composition is typed again, from whatever folder."""
    folders = {s.provider: s.path for s in hydra.runtime.config_sources if s.schema == "file"}
    name = hydra.job.config_name
    flags = {
        "--config-path": folders.get("main"),
        "--config-dir": folders.get("command-line"),
        "--config-name": None if name == "config" else name,
    }
    return (*(word for flag, value in flags.items() if value for word in (flag, value)), *map(as_typed, overrides))


def show_plan(plan: RunPlan) -> int:
    """Print the plan; returns the exit code."""
    from composer.plan_table import print_plan

    with answering():
        print_plan(plan)
    return 0


def quoted(text: str) -> str:
    """A text as Hydra's override grammar reads it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
