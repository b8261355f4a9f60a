"""Deadlines of work that somebody else does (an agent, a grader), which stand still while the framework is at work.

What nobody should be blamed for does not count: waiting for room on the machine, preparing a task, a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType

_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


class Deadline:
    """As `asyncio.timeout`, but for the time that passes in `not_counted`.

    Example:
        >>> async def example() -> bool:
        ...     async with Deadline(0.05) as deadline:
        ...         with not_counted():
        ...             await asyncio.sleep(0.1)
        ...     return deadline.expired
        >>> asyncio.run(example())
        False
    """

    def __init__(self, timeout_s: float) -> None:
        """Nothing counts before it is entered, which can be done once."""
        self._timeout_s = timeout_s
        self._timeout = asyncio.Timeout(None)
        self._began, self._not_counted_s = 0.0, 0.0
        self._num_pauses, self._paused_at = 0, 0.0

    async def __aenter__(self) -> Deadline:
        """Time begins to count."""
        await self._timeout.__aenter__()
        self._timeout.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        self._began = time.monotonic()
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """It counts no more.

        Raises:
            TimeoutError: the time was over.
        """
        self._timeout_s = self.left_s
        self._began = math.inf
        _current.reset(self._token)
        return await self._timeout.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        """Whether the time was over before the work was."""
        return self._timeout.expired()

    @property
    def left_s(self) -> float:
        """What is left of the time, also afterwards."""
        until = self._paused_at if self._num_pauses else time.monotonic()
        return self._timeout_s - max(0.0, until - self._began - self._not_counted_s)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count; of several at once, from the beginning of the first to the end of the last."""
        if not self._num_pauses:
            self._paused_at = time.monotonic()
            self._set(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                paused_s = time.monotonic() - self._paused_at
                self._not_counted_s += paused_s
                self._set(asyncio.get_running_loop().time() + self.left_s)

    def _set(self, when: float | None) -> None:
        # Where it is over, or a task that it has not waited for goes on, there is nothing to set.
        with contextlib.suppress(RuntimeError):
            self._timeout.reschedule(when)


def not_counted() -> contextlib.AbstractContextManager[None]:
    """Time that does not count for the deadline that this is within, if it is within any."""
    deadline = _current.get()
    return deadline.pause() if deadline is not None else contextlib.nullcontext()
