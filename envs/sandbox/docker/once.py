"""Things that many starts need and one has to do: who comes meanwhile waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """Values by key, each made once. A failure reaches all who wait, and is forgotten: the next tries again."""

    def __init__(self) -> None:
        """There are none."""
        self._values: dict[K, V] = {}
        self._making: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """The value, made by `make` if it is not there. It is made to the end, though all who wait are cancelled.

        Raises:
            Exception: what `make` raises.
        """
        if key not in self._values:
            task = self._making.get(key)
            if task is None:
                task = self._making[key] = asyncio.ensure_future(_awaited(make))
                task.add_done_callback(lambda done: self._making.pop(key, None))
                # All who wait for it may be cancelled.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._values[key] = await asyncio.shield(task)
        return self._values[key]

    def keys(self) -> set[K]:
        """Those that have been made."""
        return set(self._values)

    def forget(self, key: K) -> None:
        """Make it anew the next time."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()


async def _awaited(make: Callable[[], Awaitable[V]]) -> V:
    return await make()
