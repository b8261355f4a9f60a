"""The command: `composer [<word>] [overrides]`, with Hydra's flags around it; `COMMANDS` are the words.

Nothing heavy is imported here: a plan for a trillion parameters must print at once, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer import __version__
from composer.compose import HydraSession, normalise
from composer.errors import ComposerError, ConfigError, MachineError, ResumeError
from composer.explain import COMMANDS
from composer.interrupts import as_process
from composer.jobs import INTERRUPTED, run_resumed, run_single, typed
from composer.multirun import run_sweep
from composer.schema import Config
from composer.streams import answering, give_up_failed, open_closed, say, say_error

_TAKES_VALUE = ("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")
_HELP_WIDTH = 120
_INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None: those of this process, which is the command's own.

    Returns:
        The exit code: 0; 2 for a wrong config; 3 for a machine that lacks something; 130 after Ctrl-C.
    """
    if argv is None:
        return as_process(lambda: main(sys.argv[1:]))
    try:
        # A script's `composer &` starts it with SIGINT ignored; Ctrl-C and `kill -INT` must end a run all the same.
        # SIGTERM is what schedulers and containers send, SIGHUP a terminal that closes: they end a run as Ctrl-C does.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup composer` ignores it, and means it
            signal.signal(signal.SIGHUP, signal.default_int_handler)
        open_closed()
        if Path(sys.argv[0]).name == "__main__.py":  # `python -m composer`: help and completion name the command.
            sys.argv[0] = "composer"
        _find_plugins()
        return _dispatch(list(argv))
    except ComposerError as error:
        say_error(error)
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
    if command == "behaviour" and "--help" not in rest:  # it looks at a run that was, and composes no config
        return _behaviour(rest)
    args = _parse(rest)
    overrides = list(args.overrides)
    with HydraSession(args.config_dir, args.config_name or "config", args.config_path) as session:
        if args.shell_completion:
            return _complete(session, overrides)
        overrides = normalise(overrides)
        if args.help or args.hydra_help or args.cfg or args.info:
            with answering():
                return _show(session, args, overrides)
        overrides = _with_tools(session, command, overrides)
        folder = _resume_value(overrides)
        if look := _LOOKS.get(command):
            if args.multirun:
                remedy = f"`composer {command}` looks at one config at a time: leave out -m"
                raise ConfigError("--multirun", True, remedy)
            composed = session.compose(overrides)
            with answering():
                return look(composed.config, typed(composed.hydra, overrides))
        if folder is not None:
            return run_resumed(session, command, folder, overrides, multirun=args.multirun)
        if args.multirun or _asks_for_multirun(session, overrides):
            return run_sweep(session, command, overrides)
        return run_single(session, command, overrides)


def _with_tools(session: HydraSession, command: str, overrides: list[str]) -> list[str]:
    """`autoinstall` takes its agents' tools from the env: one that has them, unless the user has chosen one."""
    chosen = any(o.lstrip("+").startswith(("env=", "experiment=")) for o in overrides)
    if command != "autoinstall" or chosen or session.config_name != "config":
        return overrides
    return ["env=coding", *overrides]


def _behaviour(words: list[str]) -> int:
    from composer.behaviour import behaviour

    with answering():
        return behaviour(words)


def _doctor(config: Config, typed: Sequence[str]) -> int:
    from composer.doctor import doctor

    return doctor(config, typed)


def _audit(config: Config, typed: Sequence[str]) -> int:
    from composer.audit import audit

    return audit(config)


def _tasks(config: Config, typed: Sequence[str]) -> int:
    from composer.tasks import check_tasks

    return check_tasks(config)


def _autoinstall(config: Config, typed: Sequence[str]) -> int:
    from composer.autoinstall.command import autoinstall_all

    return autoinstall_all(config)


def _look(config: Config, typed: Sequence[str]) -> int:
    from composer.look import look

    return look(config)


_LOOKS = {"doctor": _doctor, "audit": _audit, "tasks": _tasks, "autoinstall": _autoinstall, "look": _look}
"""Commands that look at a config and answer."""


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command word (`run` if there is none) and the arguments without it.

    Example:
        >>> split_command(["--cfg", "job", "plan", "seed=1"])
        ('plan', ['--cfg', 'job', 'seed=1'])
    """
    for i, word in enumerate(argv):
        if word not in COMMANDS or (i > 0 and argv[i - 1] in _TAKES_VALUE):
            continue
        rest = list(argv[i + 1 :])
        if word == "tasks" and rest[:1] != ["--help"]:
            if rest[:1] != ["check"]:
                raise ConfigError("tasks", " ".join(rest[:1]), "write `composer tasks check [overrides]`")
            rest = rest[1:]
        return word, [*argv[:i], *rest]
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
    flag, equals, value = unknown.split(" ")[0].partition("=")
    remedy = f"no such flag; an override has no dashes: `{flag.lstrip('-')}=<value>`"
    raise ConfigError(flag, value if equals else ..., remedy)


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
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                session.hydra.app_help(config_name=name, args_parser=get_args_parser(), args=args)
            wrap = textwrap.TextWrapper(_HELP_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            for line in shown.getvalue().rstrip().splitlines():  # a group may have many options
                print(wrap.fill(line) if len(line) > _HELP_WIDTH else line)
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
