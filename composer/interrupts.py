"""Interrupts that are not lost, and an end of the process that nothing turns into a crash."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator

from composer.streams import give_up_failed

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run: Ctrl-C, schedulers and containers, a terminal that closes."""


@contextlib.contextmanager
def no_lost_interrupt(again_s: float | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if a signal that interrupts came and nothing, or something else, was raised.

    Python prints and forgets what is raised in a callback, such as those that logging runs around each fork of a
    process (Ray forks many), and libraries catch whatever an optional import raises: half imported, they fail later.

    Args:
        again_s: raise it once more if it has led nowhere after so many seconds, and so on; None: only at the end, for
            code that cleans up after itself.
    """
    came = over = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        if over:
            return
        came = True
        if again_s is not None:
            signal.setitimer(signal.ITIMER_REAL, again_s)
        raise KeyboardInterrupt

    noted = [number for number in ENDING if signal.getsignal(number) is signal.default_int_handler]
    for number in noted:
        signal.signal(number, note)
    alarm = signal.signal(signal.SIGALRM, note) if again_s is not None else None
    try:
        yield
    except Exception:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        over = True
        if alarm is not None:
            if came:
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        for number in noted:
            if signal.getsignal(number) is note:
                signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def as_process(command: Callable[[], int]) -> int:
    """Run a command as what its process is for; the process ends as soon as all is done that is registered for its end.

    Python's tear-down after that would take seconds with Ray's library loaded, and crash if its start was interrupted.
    Once the command has returned, what ends a run ends nothing any more: the process is at its end already.
    """
    code = 1

    def end() -> None:
        logging.shutdown()
        give_up_failed()
        os._exit(code)

    atexit.register(end)  # before all but logging's, so that it is called after them
    try:
        try:
            code = command()
        finally:
            _ignore_signals()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:  # one more, while the command was about to return after the first
        _ignore_signals()
        code = 130
    return code


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
