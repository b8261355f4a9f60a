"""A pool in front of a sandbox backend: sandboxes that are ready before they are asked for, and no more than fit.

It knows the backend by its contract alone, and keeps that contract itself. A sandbox that is asked for again and again
(same limits, same image, no snapshot) is kept ready: the next one then costs no more than writing its files. And a
start waits while the machine is pressed (pressure.py), first come, first served; only when none of the pool's sandboxes
runs, one is let in whatever the pressure, so that work goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from composer.contract import Finding, Sandbox, SandboxBackend, SandboxLimits, Snapshot
from composer.errors import ComposerError, SandboxError, SandboxStartError
from composer.rollout.pressure import Pressure, PressureLimits

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

    keeper: asyncio.Task[None]
    sandboxes: deque[tuple[float, Sandbox]] = field(default_factory=deque)
    asked_at: float = 0.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)


class SandboxPool:
    """Keeps `composer.contract.SandboxBackend`, in front of another that does."""

    def __init__(
        self,
        backend: SandboxBackend,
        settings: PoolSettings,
        read_pressure: Callable[[], Pressure] = Pressure.read,
    ) -> None:
        """Nothing starts before the first sandbox is asked for; `read_pressure` is asked before each start."""
        self.backend, self.settings, self.counts = backend, settings, PoolCounts()
        self._read_pressure = read_pressure
        self._ready: OrderedDict[Kind, _Ready] = OrderedDict()
        """By kind, that asked for last at the end."""
        self._num_running = 0
        self._settling: deque[tuple[float, int]] = deque()
        self._turn = asyncio.Lock()
        self._closed = False

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        """A sandbox with `files` in its `workdir`: one that was ready, or a fresh one.

        Raises:
            SandboxStartError: as of the backend; or the machine was pressed for longer than `wait_s`.
        """
        await self._wait_for_room(limits)
        try:
            kind = (limits, image)
            sandbox = await self._take(kind, files) if base is None else None
            if sandbox is None:
                self.counts.cold_starts += 1
                sandbox = await self.backend.start(files, limits, image=image, base=base)
            if base is None:
                self._asked_for(kind)
        except BaseException:
            self._num_running -= 1
            raise
        return cast("Sandbox", _Pooled(sandbox, self))

    async def _wait_for_room(self, limits: SandboxLimits) -> None:
        began = time.monotonic()
        said = False
        async with self._turn:
            while self._num_running and (why := self._pressed()):
                waited = time.monotonic() - began
                if waited > self.settings.wait_s:
                    raise SandboxStartError(
                        f"no sandbox was started for {self.settings.wait_s:g} s, since the machine is pressed "
                        f"({why}): lower env.concurrency, or raise the limits of env.pool"
                    )
                if waited > _SAYS_AFTER_S and not said:
                    logger.warning("Sandboxes wait: %s. %d run.", why, self._num_running)
                    said = True
                await asyncio.sleep(_LOOK_S)
            waited = time.monotonic() - began
            if waited >= _LOOK_S:
                self.counts.waits += 1
                self.counts.waited_s += waited
            self._num_running += 1
            self._settling.append((time.monotonic(), limits.memory_bytes // _SETTLED_SHARE))

    def _pressed(self) -> str:
        while self._settling and self._settling[0][0] < time.monotonic() - _SETTLES_S:
            self._settling.popleft()
        reserved = sum(num_bytes for _, num_bytes in self._settling)
        return self._read_pressure().over(self.settings.pressure, reserved)

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
            self._ready[kind] = _Ready(asyncio.ensure_future(self._keep_ready(kind)))
        self._ready.move_to_end(kind)
        self._ready[kind].asked_at = time.monotonic()
        self._ready[kind].asked.set()
        if len(self._ready) > _KINDS:
            next(iter(self._ready.values())).keeper.cancel()

    async def _keep_ready(self, kind: Kind) -> None:
        """Start what is taken, and stop what has waited for too long, until the kind has not been asked for so long."""
        limits, image = kind
        # Its life begins before somebody takes it.
        longer = replace(limits, lifetime_s=limits.lifetime_s + self.settings.idle_s)
        await asyncio.sleep(0)  # until it is in `_ready`
        ready, idle_s = self._ready[kind], self.settings.idle_s
        try:
            while (left_s := ready.asked_at + idle_s - time.monotonic()) > 0:
                while ready.sandboxes and ready.sandboxes[0][0] < time.monotonic() - idle_s:
                    await _stop(ready.sandboxes.popleft()[1])
                if len(ready.sandboxes) < self.settings.warm and not self._pressed():
                    sandbox = await self.backend.start({}, longer, image=image)
                    ready.sandboxes.append((time.monotonic(), sandbox))
                    continue
                ready.asked.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, 1.0)):
                        await ready.asked.wait()
        except ComposerError as error:
            logger.debug("No sandbox is kept ready: %s", error)  # who asks for one next learns why
        finally:
            del self._ready[kind]
            for _, sandbox in ready.sandboxes:
                await _stop(sandbox)

    def ended(self) -> None:
        """A sandbox that somebody had has been stopped."""
        self._num_running -= 1

    async def fork(self, sandbox: Sandbox) -> Sandbox:
        """Fork the backend's `sandbox`; it counts as running, and does not wait: who forks holds one already.

        Raises:
            OSError, SandboxError, SandboxStartError: as of `composer.contract.Sandbox.fork`.
        """
        self._num_running += 1
        try:
            return cast("Sandbox", _Pooled(await sandbox.fork(), self))
        except BaseException:
            self._num_running -= 1
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
        keepers = [ready.keeper for ready in self._ready.values()]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
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

    def __init__(self, sandbox: Sandbox, pool: SandboxPool) -> None:
        self._sandbox, self._pool = sandbox, pool
        self._stopped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def fork(self) -> Sandbox:
        return await self._pool.fork(self._sandbox)

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._pool.ended()
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
