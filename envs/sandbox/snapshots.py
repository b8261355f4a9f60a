"""The snapshots of a bubblewrap backend: which layers there are, who needs them, and how much memory they take.

A snapshot is a chain of layers (layers.py), the oldest first: those that its sandbox had started from, and a copy of
what that sandbox had written. A layer stays as long as a snapshot or a live sandbox has it in its chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from composer.contract import Snapshot
from composer.errors import SandboxError
from envs.sandbox import archive

MAX_LAYERS = 16
"""Layers below one sandbox; of a longer chain, the newest is copied into what the sandbox writes."""
_LEAST_BYTES = 2**18


class LayerServer(Protocol):
    """What holds the layers: `control.ForkServerClient`."""

    async def make_layer(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """See there."""
        ...

    def drop(self, snapshot: str) -> None:
        """See there."""
        ...


@dataclass
class Snapshots:
    """The snapshots in one fork server."""

    server: LayerServer
    max_bytes: int
    """Of all layers together."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """For the layers' names."""
    _chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _users: Counter[str] = field(default_factory=Counter)
    _bytes: dict[str, int] = field(default_factory=dict)
    """Of each layer; while it is made, what it may take."""
    _num_making: int = 0
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def chain(self, snapshot: Snapshot) -> tuple[str, ...] | None:
        """The layers of a snapshot, the oldest first; None if there is no such snapshot any more."""
        return self._chains.get(snapshot.id)

    def hold(self, chain: tuple[str, ...]) -> None:
        """A sandbox starts from these layers."""
        self._users.update(chain)

    def release(self, chain: tuple[str, ...]) -> None:
        """Who held them has ended."""
        self._users.subtract(chain)
        for layer in chain:
            if self._users[layer] <= 0:
                del self._users[layer]
                self._bytes.pop(layer, None)
                self.server.drop(layer)

    async def add(
        self, below: tuple[str, ...], most: int, request: dict[str, Any], fds: Sequence[int] = ()
    ) -> Snapshot:
        """Make a layer on top of others, and a snapshot of all of them.

        Args:
            below: the layers that the sandbox has started from.
            most: bytes that the new one can take at all.
            request: how the layer is made; see `LayerServer.make_layer`.
            fds: goes with it.

        Raises:
            OSError: ENOSPC: all snapshots together would be over `max_bytes`; or what `make_layer` raises.
        """
        # What it lies on must not go while it waits.
        self.hold(below)
        try:
            most = await self._room(most)
            layer = f"{next(self.numbers):05d}"
            self._bytes[layer] = most
            self.hold((layer,))
        except BaseException:
            self.release(below)
            raise
        chain = (*below, layer)
        self._num_making += 1
        try:
            self._bytes[layer] = await self.server.make_layer({**request, "snapshot": layer, "max_bytes": most}, fds)
        except BaseException:
            self.release(chain)
            raise
        finally:
            self._num_making -= 1
            self._look_again()
        self._chains[layer] = chain
        return Snapshot(layer)

    async def _room(self, most: int) -> int:
        """What a new layer may take, `most` at most. Waits for those that are made: few take all that they may.

        Raises:
            OSError: ENOSPC: there is next to nothing.
        """
        while (left := self.max_bytes - sum(self._bytes.values())) < most and self._num_making:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        if left < _LEAST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return min(most, left)

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        chain = self._chains.pop(snapshot.id, None)
        if chain is not None:
            self.release(chain)

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file: whole or not at all.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        with self._held(snapshot) as chain, contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for _ in chain]
            try:
                for layer, file in zip(chain, files, strict=True):
                    await self.server.make_layer({"op": "archive", "snapshot": layer}, [file.fileno()])
            except ConnectionError as e:
                raise SandboxError(f"snapshot {snapshot.id!r} could not be saved: {e}") from e
            await asyncio.to_thread(archive.pack, path, files)

    async def load(self, path: Path) -> Snapshot:
        """A snapshot from a file that `save` wrote.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no saved snapshot, or it is damaged.
        """
        snapshot = Snapshot("")
        with contextlib.ExitStack() as stack:
            # Names and attributes take room in an archive: half as much as the smallest files do, at most.
            unpacked = archive.unpacked(path, 2 * self.max_bytes + 2**20)
            files = await asyncio.to_thread(stack.enter_context, unpacked)
            for file in files:
                below, chain = snapshot, self.chain(snapshot) or ()
                try:
                    snapshot = await self.add(chain, self.max_bytes, {"op": "extract"}, [file.fileno()])
                except OSError as e:
                    if e.errno != errno.EIO:
                        raise
                    remedy = f"it is damaged, or larger than what is left of snapshot_bytes={self.max_bytes}"
                    raise SandboxError(f"{path} cannot be unpacked: {remedy}") from e
                finally:
                    self.drop(below)
        return snapshot

    @contextlib.contextmanager
    def _held(self, snapshot: Snapshot) -> Iterator[tuple[str, ...]]:
        chain = self.chain(snapshot)
        if chain is None:
            raise SandboxError(f"snapshot {snapshot.id!r} is not there any more: it was dropped, or its backend ended")
        self.hold(chain)
        try:
            yield chain
        finally:
            self.release(chain)
