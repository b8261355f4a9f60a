"""Python without its start: `python3 -m <module>` as a fork of a process that has imported pytest already.

The fork server imports pytest once; supervisors are its forks, and so is the child that runs the module. That child
is as fresh as a new interpreter: besides the standard library, pytest and this package (which is forgotten) nothing
was ever imported in its ancestors, and no test or program of anyone ever ran there. On the machine where this was
written the import costs 105 of the 140 ms of CPU time that a three-assert file takes, and the start of a bare
interpreter 11 ms.

Differences to a new interpreter: options that Python reads from PYTHON* variables at its start cannot be given (with
such a variable the command runs cold), and hash randomisation has one seed a backend.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from envs.sandbox import linux, rootfs

_SERVER_PREFIX = "composer_serve_"
"""Of what the grader runs beside a solution (envs/grading/solution_server.py); the rest of the name is random."""
# Modules that a run of one of these imports on its way.
_MODULES = (
    "code",
    "email.parser",
    "faulthandler",
    "getpass",
    "pdb",
    "readline",
    "_pytest._argcomplete",
    "_pytest.assertion.rewrite",
)


def preload() -> None:
    """Import pytest and what it imports when it runs."""
    sys.path[:] = [path for path in sys.path if path.startswith(os.path.realpath(sys.base_prefix))]
    sys.path.append(rootfs.SITE_PACKAGES)
    sys.dont_write_bytecode = True
    importlib.import_module("pytest")
    plugins = [f"_pytest.{name}" for name in importlib.import_module("_pytest.config").default_plugins]
    for name in (*_MODULES, *plugins):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in plugins:
        _list_less(sys.modules[name])


def _list_less(plugin: ModuleType) -> None:
    """Have `dir` of one of pytest's own plugins tell hooks and fixtures, and leave out what the module imports.

    pytest goes through all names of all its plugins twice, which takes longer than the rest of a short run.
    """
    names = [n for n, v in vars(plugin).items() if n.startswith("pytest") or type(v).__module__.startswith("_pytest")]
    vars(plugin)["__dir__"] = lambda: names


def serves(argv: Sequence[str], extra_environment: Mapping[str, str]) -> bool:
    """Whether a command can be answered by a fork."""
    if list(argv[:2]) != ["python3", "-m"] or len(argv) < 3:
        return False
    served = argv[2] == "pytest" or (argv[2].startswith(_SERVER_PREFIX) and argv[2].isidentifier())
    return served and not any(name.startswith("PYTHON") for name in extra_environment)


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be `python3 -m <module> <arguments>` in the current directory. Called in a forked child."""
    # What exec would have closed: the supervisor's channel, its view of other processes, the shell's pipes.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    linux.set_dumpable(True)  # as execve(2) would have made it, and not before (programs.spawn)
    # As the interpreter sets them at its start.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A repository may have packages of these names.
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    sys.prefix = sys.exec_prefix = rootfs.PYTHON_HOME
    sys.executable = f"{rootfs.PYTHON_HOME}/bin/python3"
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a string, as -m puts it
    sys.argv = [f"{rootfs.SITE_PACKAGES}/pytest/__main__.py" if module == "pytest" else module, *arguments]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    # Programs see the streams of their own terminal or pipe, not those that the fork server had.
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if fd < 2 else "backslashreplace"
        stream = open(fd, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115, PTH123 - stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code = importlib.import_module("pytest").console_main() if module == "pytest" else _run_module(module)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_module(name: str) -> int:
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if not isinstance(e.code, int | None):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        return 1
    return 0
