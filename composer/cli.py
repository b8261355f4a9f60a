"""The command: `composer [plan|doctor] [overrides]`, with Hydra's own flags in front of and behind the word.

Nothing heavy is imported here: a plan for a trillion parameters must print at once, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from composer import __version__
from composer import config as config_files
from composer.binding import bind
from composer.compose import HydraSession, directory, normalise
from composer.errors import ComposerError, ConfigError, MachineError, ResumeError, is_disk_full
from composer.explain import parse
from composer.plan import RunPlan, make_plan
from composer.plan import save as save_plan
from composer.pretrain.mix import look_at_sources
from composer.resume import resumed
from composer.rundir import RunDirectory, Status, check_free, claim, remove_unused
from composer.schema import Config
from composer.shell import as_typed, pasteable
from composer.streams import answering, give_up_failed, open_closed, say

COMMANDS = ("plan", "doctor", "run")
INTERRUPTED = 130
_TAKES_VALUE = ("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")
_INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None: those of this process.

    Returns:
        The exit code: 0; 2 for a wrong config; 3 for a machine that lacks something; 130 after Ctrl-C.
    """
    # A script's `composer &` starts it with SIGINT ignored; Ctrl-C and `kill -INT` must end a run all the same.
    # SIGTERM is what schedulers and containers send, SIGHUP a terminal that closes: they end a run as Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup composer` ignores it, and means it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    open_closed()
    if Path(sys.argv[0]).name == "__main__.py":  # `python -m composer`: help and completion name the command.
        sys.argv[0] = "composer"
    try:
        _find_plugins()
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except ComposerError as error:
        for line in (str(error), *getattr(error, "__notes__", ())):
            say(f"composer: {' '.join(line.split())}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `composer plan | head`: whoever read has read enough.
        return 1
    except Exception as error:
        say(traceback.format_exc(), sys.stderr)
        for line in (f"this is a bug of composer's: {error!r}", *getattr(error, "__notes__", ())):
            say(f"composer: {' '.join(line.split())}", sys.stderr)
        return 1
    finally:
        give_up_failed()


def _find_plugins() -> None:
    """Plugins lie where the command is called, as with `python -m composer`."""
    try:
        here = os.getcwd()  # noqa: PTH109 (as text)
    except FileNotFoundError:
        raise MachineError("the working folder does not exist any more: cd into one that does") from None
    if here not in sys.path:
        sys.path.insert(0, here)


def _dispatch(argv: list[str]) -> int:
    if "--version" in argv:
        with answering():
            print(f"composer {__version__}")
        return 0
    command, rest = split_command(argv)
    args = _parse(rest)
    overrides = list(args.overrides)
    with HydraSession(args.config_dir, args.config_name or "config", args.config_path) as session:
        if args.shell_completion:
            return _complete(session, overrides)
        overrides = normalise(overrides)
        if args.help or args.hydra_help or args.cfg or args.info:
            with answering():
                return _show(session, args, overrides)
        folder = _resume_value(overrides)
        if command == "doctor":
            if args.multirun:
                raise ConfigError("--multirun", True, "`composer doctor` looks at one config at a time: leave out -m")
            from composer.doctor import doctor

            config = session.compose(overrides).config
            with answering():
                return doctor(config)
        if folder is not None:
            return _resume(session, command, folder, overrides, multirun=args.multirun)
        if args.multirun or _asks_for_multirun(session, overrides):
            return _sweep(session, command, overrides)
        return _single(session, command, overrides)


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command word (`run` if there is none) and the arguments without it.

    Example:
        >>> split_command(["--cfg", "job", "plan", "seed=1"])
        ('plan', ['--cfg', 'job', 'seed=1'])
    """
    for i, word in enumerate(argv):
        if word in COMMANDS and (i == 0 or argv[i - 1] not in _TAKES_VALUE):
            return word, [*argv[:i], *argv[i + 1 :]]
    return "run", list(argv)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags, in any order with overrides."""
    words = list(words)
    for flag in ("--info", "-i"):
        if flag in words:
            at = words.index(flag) + 1
            if at == len(words) or words[at] not in _INFO_CHOICES:
                words.insert(at, "all")
    parser = get_args_parser()
    parser.prog, parser.error = "composer", _bad_flag
    args = parser.parse_intermixed_args(words)
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun", args.experimental_rerun, "use `composer resume=<run dir>` instead")
    chosen = [n for n in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(args, n)]
    if len(chosen) > 1:
        raise ConfigError(
            "--" + chosen[0], True, f"cannot be used with --{chosen[1].replace('_', '-')}: give one of them"
        )
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve", True, "only says how --cfg prints: add `--cfg job`")
    return args


def _bad_flag(message: str) -> NoReturn:
    """What argparse finds wrong, in one line."""
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        raise ConfigError("flag", message.removeprefix("argument "), "`composer --help` shows how flags are given")
    flag, _, value = unknown.split(" ")[0].partition("=")
    raise ConfigError(flag, value, f"no such flag; an override has no dashes: `{flag.lstrip('-')}=<value>`")


def _complete(session: HydraSession, overrides: list[str]) -> int:
    """Answer the shell: Hydra completes groups and keys, the command words are ours."""
    line = os.environ.get("COMP_LINE", "")
    if any(o.startswith("query=") for o in overrides) and line:
        words = line.split()
        last = "" if line.endswith(" ") or len(words) < 2 else words[-1]
        if len(words) <= 2 and not (len(words) == 2 and line.endswith(" ")):
            for word in COMMANDS:
                if word.startswith(last):
                    print(word)
        command, rest = split_command(words[1:])
        os.environ["COMP_LINE"] = " ".join([words[0], *rest]) + (" " if line.endswith(" ") or not rest else "")
    try:
        session.hydra.shell_completion(config_name=session.config_name, overrides=overrides)
    except (ValueError, KeyError, AttributeError):  # no subcommand, no such shell, no line to complete
        raise ConfigError("--shell-completion", " ".join(overrides), "write `-sc install=<bash, fish, zsh>`") from None
    return 0


def _show(session: HydraSession, args: argparse.Namespace, overrides: list[str]) -> int:
    """`--help`, `--hydra-help`, `--cfg` and `--info`, as Hydra prints them; what is wrong is said after the print."""
    cfg = session.raw(overrides)
    name = session.config_name
    if args.cfg and args.package and OmegaConf.select(cfg, args.package) is None:
        raise ConfigError("--package", args.package, "no such key; `--cfg job` without it shows all")
    try:
        if args.help:
            session.hydra.app_help(config_name=name, args_parser=get_args_parser(), args=args)
        elif args.hydra_help:
            session.hydra.hydra_help(config_name=name, args_parser=get_args_parser(), args=args)
        elif args.cfg:
            session.hydra.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
        else:
            session.hydra.show_info(args.info, config_name=name, overrides=overrides)
    except OmegaConfBaseException as error:
        session.bind(cfg, overrides)  # names the key, if it is one of ours
        remedy = f"cannot be resolved ({' '.join(str(error).split())}): leave --resolve out to see it as written"
        raise ConfigError("--cfg", args.cfg, remedy) from None
    sys.stdout.flush()
    if args.cfg:
        session.bind(cfg, overrides)
    return 0


def _single(session: HydraSession, command: str, overrides: list[str]) -> int:
    composed = session.compose(overrides)
    plan = make_plan(composed.config, _typed(composed.hydra, overrides))
    wanted, chosen_as = directory(composed.hydra, "hydra.run.dir")
    check_free(wanted, chosen_as=chosen_as)
    if command == "plan":
        return _print_plan(plan)
    keep = chosen_as is not None and wanted.exists()
    config = config_files.anchored(composed.config)
    run_dir = claim(wanted, chosen_as=chosen_as)
    with _unused_removed(run_dir, keep=keep):
        return _through_hydra(session, overrides, run_dir, lambda: _execute(config, plan, run_dir))


@contextlib.contextmanager
def _unused_removed(run_dir: Path, *, keep: bool = False) -> Iterator[None]:
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


def _typed(hydra: DictConfig | HydraConf, overrides: Sequence[str]) -> tuple[str, ...]:
    """The words with which this composition is typed again, from whatever folder."""
    folders = {s.provider: s.path for s in hydra.runtime.config_sources if s.schema == "file"}
    name = hydra.job.config_name
    flags = {
        "--config-path": folders.get("main"),
        "--config-dir": folders.get("command-line"),
        "--config-name": None if name == "config" else name,
    }
    return (*(word for flag, value in flags.items() if value for word in (flag, value)), *map(as_typed, overrides))


def _resume(session: HydraSession, command: str, folder: str, overrides: list[str], *, multirun: bool) -> int:
    run_dir = Path(folder).expanduser().absolute()
    if multirun:
        raise ResumeError(f"resume={run_dir}: one run is resumed at a time: leave out -m")
    others = [o for o in overrides if not o.lstrip("+~").startswith(("resume=", "hydra.", "hydra/"))]
    config, changes = resumed(run_dir, others, starts=command == "run")
    plan = make_plan(config, (f"resume={run_dir}", *map(as_typed, others)))
    does = "resuming" if command == "run" else "plan of"
    say(f"{does} {run_dir}; " + ("differs from before:" if changes else "nothing differs from before"))
    for change in changes:
        say(f"  {change}")
    if command == "plan":
        return _print_plan(plan)

    def job() -> int:
        log.info("resumed; %s", "; ".join(changes) or "nothing differs")
        return _execute(config, plan, run_dir)

    ours = [o for o in overrides if o.startswith(("hydra.", "hydra/"))]
    return _through_hydra(session, [*ours, "hydra.output_subdir=null"], run_dir, job)


def _through_hydra(session: HydraSession, overrides: list[str], run_dir: Path, job: Callable[[], int]) -> int:
    """Let Hydra set up logging and write `.hydra/`, then run the job; its error comes out as it was raised."""
    outcome: list[Any] = []

    def task(cfg: DictConfig) -> None:
        try:
            outcome.append(job())
        except BaseException as error:
            outcome.append(error)

    where = f"hydra.run.dir={_quoted(str(run_dir))}"
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


def _sweep(session: HydraSession, command: str, overrides: list[str]) -> int:
    """Check every job before the first starts, then hand over to Hydra's sweeper and launcher."""
    cfg = session.raw(overrides, RunMode.MULTIRUN)
    hydras = [o for o in overrides if o.lstrip("+~").startswith(("hydra.", "hydra/"))]
    places = {os.curdir: "the sweep"}
    for number, job in enumerate(_jobs(session, cfg, overrides)):
        composed = session.compose([*hydras, *job])
        place = os.path.normpath(_subdirectory(composed.hydra, cfg, number))
        if place in places:
            remedy = f"{places[place]} and job {number} would share this directory: put ${{hydra.job.num}} into it"
            raise ConfigError("hydra.sweep.subdir", place, remedy)
        places[place] = f"job {number}"
        plan = make_plan(composed.config, _typed(composed.hydra, job))
        if command == "plan":
            say(f"\njob {number}: {' '.join(map(as_typed, job))}")
            _print_plan(plan)
    HydraConfig.instance().set_config(cfg)
    wanted, chosen_as = directory(cfg.hydra, "hydra.sweep.dir")
    check_free(wanted, chosen_as=chosen_as)
    if command == "plan":
        return 0
    sweep_dir = claim(wanted, chosen_as=chosen_as)
    kept = [o for o in overrides if not o.startswith(("hydra.sweep.dir=", "hydra.mode="))]
    where = [f"hydra.sweep.dir={_quoted(str(sweep_dir))}", "hydra.mode=MULTIRUN"]
    try:
        session.hydra.multirun(session.config_name, sweep_job, [*kept, *where])
    except HydraException as error:
        raise ConfigError("hydra.sweeper", str(cfg.hydra.sweeper._target_), " ".join(str(error).split())) from error
    return 0


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
    with _unused_removed(run_dir):
        code = _execute(config, make_plan(config, _typed(hydra, hydra.overrides.task)), run_dir)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ComposerError(f"the job in {run_dir} ended with exit code {code}: see composer.log there")
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return float(summary["evaluation"]["after"][f"average_at_{config.evaluation.samples_per_task}"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _execute(config: Config, plan: RunPlan, run_dir: Path) -> int:
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
            if (run_dir / "logs").is_dir():  # something was begun
                error.add_note(f"the processes' own logs are in {run_dir / 'logs'}")
                error.add_note(f"what is finished is kept; continue with: {pasteable('composer', f'resume={run_dir}')}")
            raise error from cause.__cause__
        finally:
            directory.set_status(status)
    return code


def _print_plan(plan: RunPlan) -> int:
    from composer.plan_table import print_plan

    with answering():
        print_plan(plan)
    return 0


def _asks_for_multirun(session: HydraSession, overrides: list[str]) -> bool:
    """Whether the config itself says `hydra.mode: MULTIRUN`, as an override or in the user's own file."""
    own_files = session.config_dir is not None or session.config_name != "config"
    if not own_files and not any("hydra" in o or "experiment" in o for o in overrides):
        return False
    return session.raw(overrides, RunMode.MULTIRUN).hydra.mode == RunMode.MULTIRUN


def _resume_value(overrides: list[str]) -> str | None:
    """The directory given as `resume=`, if any."""
    given = [o for o in overrides if o.lstrip("+").startswith("resume=")]
    if not given or given[-1].endswith("=null"):
        return None
    typed = given[-1].partition("=")[2]
    try:
        value = OverridesParser.create().parse_override(given[-1]).value()
    except HydraException:  # A path with characters that Hydra wants quoted; a shell has quoted it already.
        value = typed.strip("'\"")
    folder = value if isinstance(value, str) else typed  # a folder that is called 3
    if not folder.strip():
        raise ResumeError(f"{given[-1]}: names no directory: give that of a run, or leave `resume` out")
    return folder


def _quoted(text: str) -> str:
    """A text as Hydra's override grammar reads it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
