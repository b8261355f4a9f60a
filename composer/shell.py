"""Commands as a person can paste them into the shell from which this process was called."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import sys
from pathlib import Path


def pasteable(*words: str) -> str:
    """A command line of a program of ours, with its path where PATH does not lead to it.

    Args:
        words: the program's name (`composer`, `mlflow`) and its arguments, not quoted yet.

    Example:
        >>> pasteable("true", "resume=runs/my run")
        "true 'resume=runs/my run'"
    """
    name, *arguments = words
    called, beside = Path(sys.argv[0]), Path(sys.executable).with_name(name)
    if shutil.which(name) is None:
        name = next((str(path) for path in (called, beside) if path.name == name and path.is_file()), name)
    return shlex.join((name, *arguments))


def free_port(first: int) -> int:
    """The first of a hundred ports from `first` on at which nobody listens on loopback; `first` if all are taken."""
    for port in range(first, first + 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection's last minute is no listener
            listener.bind(("127.0.0.1", port))
            return port
    return first


def as_typed(override: str) -> str:
    """An override as a person types it, without the signs that `composer.compose.normalise` puts before it.

    Example:
        >>> as_typed("++mix.phases.sft.tokens=1"), as_typed("+experiment=composer2")
        ('mix.phases.sft.tokens=1', 'experiment=composer2')
    """
    return override.removeprefix("+" if override.startswith("+experiment=") else "++")
