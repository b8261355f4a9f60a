"""pytest without its start: `python3 -m pytest ...` as a fork of a process that has imported it already.

The fork server imports pytest once; supervisors are its forks, and so is the child that runs the tests. That child
is as fresh as a new interpreter: nothing but the standard library and pytest was ever imported in its ancestors, and
no test or program of anyone ever ran there. On the machine where this was written the import costs 105 of the
140 ms of CPU time that a three-assert file takes.

Differences to a new interpreter: options that Python reads from PYTHON* variables at its start cannot be given (with
such a variable the command runs cold), and hash randomisation has one seed a backend.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from envs.sandbox import rootfs

_COMMAND = ["python3", "-m", "pytest"]
# Modules that a run of pytest imports on its way.
_MODULES = (
    "ast",
    "bdb",
    "cmd",
    "code",
    "doctest",
    "faulthandler",
    "pdb",
    "readline",
    "unittest.mock",
    "xml.etree.ElementTree",
    "_pytest._argcomplete",
    "_pytest.assertion.rewrite",
)


def preload() -> None:
    """Import pytest and what it imports when it runs."""
    sys.path[:] = [path for path in sys.path if path.startswith(os.path.realpath(sys.base_prefix))]
    sys.path.append(rootfs.SITE_PACKAGES)
    sys.dont_write_bytecode = True
    importlib.import_module("pytest")
    plugins = importlib.import_module("_pytest.config").default_plugins
    for name in (*_MODULES, *(f"_pytest.{plugin}" for plugin in plugins)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def serves(argv: Sequence[str], extra_environment: Mapping[str, str]) -> bool:
    """Whether a command can be answered by a fork."""
    return list(argv[:3]) == _COMMAND and not any(name.startswith("PYTHON") for name in extra_environment)


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be `python3 -m pytest <arguments>` in the current directory. Called in a forked child."""
    # What exec would have closed: the supervisor's channel, its view of other processes, the shell's pipes.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    os.environ.clear()
    os.environ.update(environment)
    sys.prefix = sys.exec_prefix = rootfs.PYTHON_HOME
    sys.executable = f"{rootfs.PYTHON_HOME}/bin/python3"
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a string, as -m puts it
    sys.argv = [f"{rootfs.SITE_PACKAGES}/pytest/__main__.py", *arguments]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    # Programs see the streams of their own terminal or pipe, not those that the fork server had.
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if fd < 2 else "backslashreplace"
        stream = open(fd, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115, PTH123 - stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code = importlib.import_module("pytest").console_main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
