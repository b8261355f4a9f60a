"""Interrupts that are not lost, and an end of the process that nothing turns into a crash."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from composer.streams import give_up_failed

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run: Ctrl-C, schedulers and containers, a terminal that closes."""


@contextlib.contextmanager
def no_lost_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if a signal that interrupts came and nothing, or something else, was raised.

    Python prints and forgets what is raised in a callback, such as those that logging runs around each fork of a
    process (Ray forks many), and libraries catch whatever an optional import raises: half imported, they fail later.
    """
    came = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    noted = [number for number in ENDING if signal.getsignal(number) is signal.default_int_handler]
    for number in noted:
        signal.signal(number, note)
    try:
        yield
    except Exception:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in noted:
            if signal.getsignal(number) is note:
                signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


_ends_at_once = False


def end_at_once() -> None:
    """Let this process end without Python's tear-down, in which Ray's library crashes if its start was interrupted."""
    global _ends_at_once
    _ends_at_once = True


def as_process(command: Callable[[], int]) -> int:
    """Run a command whose exit code is that of this process, also if it ends at once."""
    code = 1

    def end() -> None:
        if _ends_at_once:
            give_up_failed()
            os._exit(code)

    atexit.register(end)  # before anything else is, so that it is called last
    code = command()
    return code
