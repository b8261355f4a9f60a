"""A pool in front of a sandbox backend: sandboxes that are ready before they are asked for, and no more than fit.

It knows the backend by its contract alone, and keeps that contract itself. A sandbox that is asked for again and again
(same limits, same image, no snapshot) is kept ready: the next one then costs no more than writing its files. And a
start waits while their machine is pressed (pressure.py), first come, first served; only when none of the pool's
sandboxes runs, one is let in whatever the pressure, so that work goes on. For the same reason, whoever holds one
already does not wait for another (`together`): it would wait for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from composer.contract import Finding, Sandbox, SandboxBackend, SandboxLimits, Snapshot
from composer.errors import ComposerError, SandboxError, SandboxStartError
from composer.rollout import pressure
from composer.rollout.deadline import not_counted
from composer.rollout.pressure import PressureLimits
from composer.types import Pressure

logger = logging.getLogger(__name__)

_KINDS = 4
"""Kinds of sandboxes kept ready at a time: agents' and graders', of two images."""
_MOST_FILES = 64
"""Each is a call of its own for a sandbox that is there already; more are sooner in a fresh one."""
_LOOK_S = 0.05
_SETTLES_S = 2.0
_SETTLED_SHARE = 8
"""For so long, this part of the memory that a new sandbox may use counts as used: it has not had time to."""
_SAYS_AFTER_S = 10.0

Kind = tuple[SandboxLimits, str]
"""Limits and image."""


@dataclass(frozen=True)
class PoolSettings:
    """Named as in `composer.schema.PoolConfig`."""

    warm: int = 2
    """Sandboxes of a kind that are kept ready."""
    idle_s: float = 60.0
    """One that nobody has taken for so long is stopped."""
    wait_s: float = 600.0
    """A start that had to wait for longer fails."""
    pressure: PressureLimits = field(default_factory=PressureLimits)

    @classmethod
    def from_config(cls, pool: Any) -> PoolSettings:
        """From a `PoolConfig`."""
        limits = PressureLimits(pool.runnable_per_cpu, pool.memory_left_bytes, pool.disk_left_bytes)
        return cls(pool.warm, pool.idle_s, pool.wait_s, limits)


@dataclass
class PoolCounts:
    """What a pool has done so far."""

    warm_starts: int = 0
    cold_starts: int = 0
    waits: int = 0
    """Starts that the machine's pressure held up."""
    waited_s: float = 0.0


@dataclass
class _Ready:
    """The sandboxes of a kind that are ready, the oldest first, each with since when."""

    sandboxes: deque[tuple[float, Sandbox]] = field(default_factory=deque)
    asked_at: float = 0.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None


@dataclass
class _Party:
    """One piece of work, which may need several sandboxes at a time."""

    num_running: int = 0


_party: ContextVar[_Party | None] = ContextVar("party", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """One piece of work: while it holds a sandbox, its further ones do not wait for room."""
    token = _party.set(_Party())
    try:
        yield
    finally:
        _party.reset(token)


class SandboxPool:
    """Keeps `composer.contract.SandboxBackend`, in front of another that does."""

    def __init__(
        self,
        backend: SandboxBackend,
        settings: PoolSettings,
        read_pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        """Nothing starts before the first sandbox is asked for.

        Args:
            backend: starts the sandboxes.
            settings: how many wait ready, and how hard the machine may be pressed.
            read_pressure: asked before each start; None: the backend is, or this machine looked at.
        """
        self.backend, self.settings, self.counts = backend, settings, PoolCounts()
        self._read_pressure = read_pressure
        self._ready: OrderedDict[Kind, _Ready] = OrderedDict()
        """By kind, that asked for last at the end."""
        self._keepers: set[asyncio.Task[None]] = set()
        """Of those in `_ready`, and those that have been dropped and still clean up."""
        self._num_running = 0
        self._settling: deque[tuple[float, int]] = deque()
        self._queue: deque[object] = deque()
        """Starts that wait for room, the first one first."""
        self._moved = asyncio.Event()
        """Set, and replaced, when one of them has left."""
        self._closed = False

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        """A sandbox with `files` in its `workdir`: one that was ready, or a fresh one.

        Raises:
            SandboxStartError: as of the backend; or the machine was pressed for longer than `wait_s`.
        """
        party = _party.get() or _Party()
        with not_counted():
            await self._wait_for_room(limits, party)
        try:
            kind = (limits, image)
            sandbox = await self._take(kind, files) if base is None else None
            if sandbox is None:
                self.counts.cold_starts += 1
                sandbox = await self.backend.start(files, limits, image=image, base=base)
            if base is None:
                self._asked_for(kind)
        except BaseException:
            self.ended(party)
            raise
        return cast("Sandbox", _Pooled(sandbox, self, party))

    async def _wait_for_room(self, limits: SandboxLimits, party: _Party) -> None:
        began, said, me, why = time.monotonic(), False, object(), ""
        self._queue.append(me)
        try:
            # Whoever holds one does not queue: the first in the queue may wait for just that one to end.
            while not party.num_running:
                if self._queue[0] is me and not (self._num_running and (why := await self._pressed())):
                    break
                waited = time.monotonic() - began
                if waited > self.settings.wait_s:
                    raise SandboxStartError(
                        f"no sandbox was started for {self.settings.wait_s:g} s, since the machine is pressed "
                        f"({why or 'others wait too'}): lower env.concurrency, or raise the limits of env.pool"
                    )
                if why and waited > _SAYS_AFTER_S and not said:
                    logger.warning("Sandboxes wait: %s. %d run.", why, self._num_running)
                    said = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._moved.wait()
            waited = time.monotonic() - began
            if waited >= _LOOK_S:
                self.counts.waits += 1
                self.counts.waited_s += waited
            self._began(party)
            self._settling.append((time.monotonic(), limits.memory_bytes // _SETTLED_SHARE))
        finally:
            self._queue.remove(me)
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

    async def _pressed(self) -> str:
        """Which limit of pressure is passed; empty if none is."""
        now = await self._pressure()
        while self._settling and self._settling[0][0] < time.monotonic() - _SETTLES_S:
            self._settling.popleft()
        reserved = sum(num_bytes for _, num_bytes in self._settling)
        return pressure.over(now, self.settings.pressure, reserved)

    async def _pressure(self) -> Pressure:
        if self._read_pressure is not None:
            return self._read_pressure()
        elsewhere = getattr(self.backend, "pressure", None)
        known: Pressure | None = await elsewhere() if elsewhere is not None else None
        return known if known is not None else pressure.read()

    async def _take(self, kind: Kind, files: Mapping[str, bytes]) -> Sandbox | None:
        """One that is ready, with the files in it; None if there is none, or none that works any more."""
        if kind not in self._ready or len(files) > _MOST_FILES:
            return None
        ready = self._ready[kind].sandboxes
        while ready:
            _, sandbox = ready.popleft()
            try:
                await _populate(sandbox, files)
            except BaseException as error:
                await _stop(sandbox)
                if isinstance(error, SandboxError) and not isinstance(error, SandboxStartError):
                    continue  # it had ended
                raise
            self.counts.warm_starts += 1
            return sandbox
        return None

    def _asked_for(self, kind: Kind) -> None:
        """Have sandboxes of this kind kept ready from now on; the kind that was asked for least lately is dropped."""
        if not self.settings.warm or self._closed:
            return
        if kind not in self._ready:
            ready = self._ready[kind] = _Ready(asked_at=time.monotonic())
            ready.keeper = asyncio.ensure_future(self._keep_ready(kind, ready))
            self._keepers.add(ready.keeper)
            ready.keeper.add_done_callback(self._keepers.discard)
        self._ready.move_to_end(kind)
        self._ready[kind].asked_at = time.monotonic()
        self._ready[kind].asked.set()
        if len(self._ready) > _KINDS:
            # From now on nobody finds it, and whoever asks for its kind gets another keeper.
            _, dropped = self._ready.popitem(last=False)
            if dropped.keeper is not None:
                dropped.keeper.cancel()

    async def _keep_ready(self, kind: Kind, ready: _Ready) -> None:
        """Start what is taken, and stop what has waited for too long, until the kind has not been asked for so long."""
        try:
            await self._refill(kind, ready)
        except ComposerError as error:
            logger.debug("No sandbox is kept ready: %s", error)  # who asks for one next learns why
        finally:
            if self._ready.get(kind) is ready:
                del self._ready[kind]
            # All at once, since others take of them meanwhile; and to the end, also when it is cancelled once more.
            left = [ready.sandboxes.popleft()[1] for _ in range(len(ready.sandboxes))]
            stopping = asyncio.gather(*(sandbox.stop() for sandbox in left))
            while not stopping.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(stopping)

    async def _refill(self, kind: Kind, ready: _Ready) -> None:
        limits, image = kind
        idle_s = self.settings.idle_s
        # Its life begins before somebody takes it.
        longer = replace(limits, lifetime_s=limits.lifetime_s + idle_s)
        while (left_s := ready.asked_at + idle_s - time.monotonic()) > 0:
            while ready.sandboxes and ready.sandboxes[0][0] < time.monotonic() - idle_s:
                await _stop(ready.sandboxes.popleft()[1])
            if len(ready.sandboxes) < self.settings.warm and not await self._pressed():
                sandbox = await self.backend.start({}, longer, image=image)
                ready.sandboxes.append((time.monotonic(), sandbox))
                continue
            ready.asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await ready.asked.wait()

    def _began(self, party: _Party) -> None:
        self._num_running += 1
        party.num_running += 1

    def ended(self, party: _Party) -> None:
        """A sandbox that `party` had has been stopped."""
        self._num_running -= 1
        party.num_running -= 1

    async def fork(self, sandbox: Sandbox, party: _Party) -> Sandbox:
        """Fork the backend's `sandbox`; it counts as running, and does not wait: who forks holds one already.

        Raises:
            OSError, SandboxError, SandboxStartError: as of `composer.contract.Sandbox.fork`.
        """
        self._began(party)
        try:
            return cast("Sandbox", _Pooled(await sandbox.fork(), self, party))
        except BaseException:
            self.ended(party)
            raise

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """See `composer.contract.SandboxBackend`."""
        await self.backend.save(snapshot, path)

    async def load(self, path: Path) -> Snapshot:
        """See `composer.contract.SandboxBackend`."""
        return await self.backend.load(path)

    async def drop(self, snapshot: Snapshot) -> None:
        """See `composer.contract.SandboxBackend`."""
        await self.backend.drop(snapshot)

    async def close(self) -> None:
        """Stop every sandbox, those that are ready too. Idempotent; raises nothing."""
        self._closed = True
        keepers = list(self._keepers)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._ready.clear()  # of keepers that had not begun
        await self.backend.close()
        self._closed = False

    def check(self) -> list[Finding]:
        """See `composer.contract.SandboxBackend`."""
        return self.backend.check()

    async def audit(self) -> list[Finding]:
        """See `composer.contract.SandboxBackend`."""
        return await self.backend.audit()

    def sweep(self) -> int:
        """See `composer.contract.SandboxBackend`."""
        return self.backend.sweep()


class _Pooled:
    """A sandbox that tells the pool when it ends."""

    def __init__(self, sandbox: Sandbox, pool: SandboxPool, party: _Party) -> None:
        self._sandbox, self._pool, self._party = sandbox, pool, party
        self._stopped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def fork(self) -> Sandbox:
        return await self._pool.fork(self._sandbox, self._party)

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._pool.ended(self._party)
        await self._sandbox.stop()


async def _populate(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Write the first files.

    Raises:
        SandboxError: the sandbox is gone.
        SandboxStartError: a file cannot be written.
    """
    await sandbox.stats()  # which a sandbox that has ended does not answer
    for path, content in files.items():
        try:
            await sandbox.write(path, content)
        except OSError as error:
            message = f"sandbox {sandbox.id}: file {path!r:.160} cannot be written: {error.strerror or error}"
            raise SandboxStartError(message) from error


async def _stop(sandbox: Sandbox) -> None:
    """Stop for certain, also when the caller is being cancelled."""
    await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
