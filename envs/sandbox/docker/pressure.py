"""How hard the machine of an engine is pressed, as far as that can be known from here.

An engine says what its machine has, and not what is left of it. But /proc is the kernel's in every container: a small
container of our own, in which nothing else ever runs, is asked what a program on that machine would see. Where a
runtime shows containers a machine of its own (gVisor, Kata), what it shows is not the machine's, and nothing is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psutil

from composer.contract import Sandbox, SandboxLimits
from composer.errors import SandboxError
from composer.types import Pressure

log = logging.getLogger(__name__)

LIMITS = SandboxLimits(memory_bytes=64 * 2**20, disk_bytes=2**20, lifetime_s=3600.0)
"""Of the container that is asked."""
UNKNOWN = Pressure(None, None, None)
_FRESH_S, _DISK_FRESH_S = 1.0, 15.0
_AGAIN_S = 30.0
"""After the container could not be asked."""
_ALIKE = 0.02
"""By so much of it, what a container sees of the memory may differ from what the engine says that there is."""


def is_here(address: str, info: Mapping[str, Any]) -> bool:
    """Whether an engine runs on this very machine: its socket alone does not say so, which may be forwarded.

    Args:
        address: of the engine.
        info: what it says of itself.
    """
    return (
        address.startswith("unix://")
        and info.get("Name") == socket.gethostname()
        and info.get("KernelVersion") == os.uname().release
        and info.get("NCPU") == os.cpu_count()
        and info.get("MemTotal") == psutil.virtual_memory().total
    )


class Gauge:
    """Reads the pressure of an engine's machine, no more often than it changes."""

    def __init__(
        self, describe: Callable[[], Awaitable[tuple[str, Mapping[str, Any]]]], start: Callable[[], Awaitable[Sandbox]]
    ) -> None:
        """Nothing is asked yet.

        Args:
            describe: the engine's address, and what it says of itself.
            start: starts a container with `LIMITS` for this.
        """
        self._describe, self._start = describe, start
        self._info: Mapping[str, Any] | None = None
        self._is_here = False
        self._probe: Sandbox | None = None
        self._lock = asyncio.Lock()
        self._now, self._until, self._disk_until = UNKNOWN, 0.0, 0.0

    async def read(self) -> Pressure | None:
        """The pressure, with None for what is not known; None: the engine runs on this machine. Raises nothing."""
        async with self._lock:
            if time.monotonic() < self._until:
                return self._now
            try:
                if self._info is None:
                    address, self._info = await self._describe()
                    self._is_here = is_here(address, self._info)
                if self._is_here:
                    return None
                self._now = await self._look(self._info)
                self._until = time.monotonic() + _FRESH_S
            except (SandboxError, OSError) as e:
                log.warning("how hard the Docker engine's machine is pressed is not known: %s", e)
                self._now, self._until = UNKNOWN, time.monotonic() + _AGAIN_S
                await self._stop()
            return self._now

    async def _look(self, info: Mapping[str, Any]) -> Pressure:
        if self._probe is None:
            self._probe = await self._start()
        memory = await self._probe.read("/proc/meminfo")
        threads = await self._probe.read("/proc/stat")
        disk = self._now.disk_bytes
        if time.monotonic() >= self._disk_until:
            # The container's root lies where the engine keeps its images.
            shown = await self._probe.exec(["stat", "-f", "-c", "%a %S", "/"])
            disk = free_bytes(shown.output) if shown.exit_code == 0 else None
            self._disk_until = time.monotonic() + _DISK_FRESH_S
        return pressure_of(memory, threads, disk, info)

    async def _stop(self) -> None:
        probe, self._probe = self._probe, None
        self._disk_until = 0.0
        if probe is not None:
            await probe.stop()

    def forget(self) -> None:
        """The engine's containers have been removed, and another may answer at its address."""
        self._probe = self._info = None
        self._until = self._disk_until = 0.0


def pressure_of(memory: bytes, threads: bytes, disk_bytes: int | None, info: Mapping[str, Any]) -> Pressure:
    r"""A reading from what a container sees.

    Args:
        memory: its /proc/meminfo.
        threads: its /proc/stat.
        disk_bytes: free where the engine's images lie.
        info: what the engine says that its machine has; what contradicts it is the container's own.

    Example:
        >>> meminfo, stat = b"MemTotal: 4000 kB\nMemAvailable: 3000 kB\n", b"cpu0 1\ncpu1 1\nprocs_running 3\n"
        >>> pressure_of(meminfo, stat, None, {"MemTotal": 4096000, "NCPU": 2})
        Pressure(runnable_per_cpu=1.5, memory_bytes=3072000, disk_bytes=None)
    """
    kilobytes = {name: int(value) for name, value in re.findall(rb"(?m)^(\w+):\s+(\d+) kB", memory)}
    total, said = kilobytes.get(b"MemTotal", 0) * 1024, int(info.get("MemTotal") or 0)
    available = kilobytes.get(b"MemAvailable")
    if available is not None:
        available = available * 1024 if abs(total - said) <= _ALIKE * said else None
    num_cpus = len(re.findall(rb"(?m)^cpu\d+ ", threads))
    running = re.search(rb"(?m)^procs_running (\d+)", threads)
    runnable = int(running[1]) / num_cpus if running and num_cpus and num_cpus == info.get("NCPU") else None
    return Pressure(runnable, available, disk_bytes)


def free_bytes(shown: bytes) -> int | None:
    """What `stat -f` says is free: blocks that an ordinary user may have, and their size.

    Example:
        >>> free_bytes(b"10 4096")
        40960
    """
    words = shown.split()
    return int(words[0]) * int(words[1]) if len(words) == 2 and all(map(bytes.isdigit, words)) else None


def in_words(now: Pressure | None) -> str:
    """What is known, and what is not."""
    if now is None:
        return "sandboxes run on this machine, whose own pressure new ones wait for"
    parts = {
        "runnable threads": now.runnable_per_cpu,
        "free memory": now.memory_bytes,
        "free disk": now.disk_bytes,
    }
    known = [name for name, value in parts.items() if value is not None]
    unknown = [name for name, value in parts.items() if value is None]
    seen = f"new sandboxes wait for the engine's machine by its {', '.join(known)}" if known else "nothing is known"
    return f"{seen}; not known, and so never waited for: {', '.join(unknown)}" if unknown else seen
