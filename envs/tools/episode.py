"""What a tool keeps of an episode. One tool object serves many at a time, so it is kept by the sandbox they happen in.

A harness may hand a tool a sandbox in a wrapper (to time its commands). Such a wrapper has to offer `unwrapped`: the
sandbox itself, the same object in every call of an episode. A bare sandbox needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from composer.contract import Sandbox

T = TypeVar("T")


def unwrapped(sandbox: Sandbox) -> Sandbox:
    """The sandbox itself, out of a harness's wrapper."""
    return getattr(sandbox, "unwrapped", sandbox)


class EpisodeState(Generic[T]):
    """A value for every episode, made when first asked for, and gone with its sandbox."""

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` gives the value that an episode starts with."""
        self._make = make
        self._values: WeakKeyDictionary[Sandbox, T] = WeakKeyDictionary()

    def __len__(self) -> int:
        """How many episodes are remembered."""
        return len(self._values)

    def of(self, sandbox: Sandbox) -> T:
        """The value of the episode that happens in a sandbox."""
        key = unwrapped(sandbox)
        if key not in self._values:
            self._values[key] = self._make()
        return self._values[key]
