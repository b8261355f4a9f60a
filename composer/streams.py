"""Standard output and error as they may be: closed by the shell, on a full disk, into a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO

from composer.errors import ComposerError
from composer.terminal import printable


def open_closed() -> None:
    """Python has None for a stream that the shell closed (`>&-`), and whoever prints would fail.

    A line of a log that cannot be written (a terminal that has gone, a full disk) is lost as quietly: Python would
    print a traceback for each of them, or raise where that fails too.
    """
    logging.raiseExceptions = False
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None or getattr(sys, name).closed:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (for as long as the process)
            os.set_inheritable(stream.fileno(), True)  # it mostly gets the closed descriptor, which children write to
            setattr(sys, name, stream)


def give_up_failed() -> None:
    """What a stream did not take would fail once more when Python exits, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print what is good to know: a full disk or a closed pipe must not stop a run."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=stream or sys.stdout, flush=True)


def say_error(error: BaseException) -> None:
    """Print an error as the command does: a line for its sentence and one for each note."""
    for line in (str(error), *getattr(error, "__notes__", ())):
        say(f"composer: {' '.join(line.split())}", sys.stderr)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Around a command whose output is all that is asked for: one that cannot be written is an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        try:
            print(flush=True)  # fails again, if it was this stream that failed
        except OSError:
            remedy = "free space, or send it elsewhere"
            raise ComposerError(f"standard output cannot be written ({error.strerror}): {remedy}") from None
        raise
