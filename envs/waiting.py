"""Waits for file descriptors, whatever their numbers: select(2) refuses those from 1024 on, which long runs get to."""

from __future__ import annotations

import math
import select

_LONGEST_MS = 2**31 - 1
"""What poll(2) takes: 24 days."""


def ready(*fds: int, timeout_s: float | None = None, to_write: bool = False) -> list[int]:
    """Those of `fds` that can be read, or written if `to_write`, without waiting; waits until one can be.

    One whose other end hung up, that has an error or is closed counts as ready, since using it will tell. A descriptor
    of a process (pidfd) is ready when that has ended.

    Args:
        *fds: numbers of open descriptors.
        timeout_s: for how long to wait at most; not above 0: only look; None: without end.
        to_write: wait until one can be written, and not until one can be read.

    Returns:
        Empty if the time went by.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLOUT if to_write else select.POLLIN)
    limit = None if timeout_s is None else min(_LONGEST_MS, math.ceil(1000 * max(0.0, timeout_s)))
    return [fd for fd, _ in poll.poll(limit)]
