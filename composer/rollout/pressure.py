"""How hard this machine is pressed just now: by which new sandboxes are let in or have to wait.

Sandboxes of a remote engine run on another machine, of which its backend says what it knows (`Pressure`).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from composer.types import Pressure

_CGROUP = Path("/sys/fs/cgroup")


def read() -> Pressure:
    """Look at this machine now. What the kernel does not say counts as no pressure."""
    return Pressure(_runnable() / (os.cpu_count() or 1), available_memory_bytes(), shutil.disk_usage(_scratch()).free)


def over(now: Pressure, limits: PressureLimits, reserved_bytes: int = 0) -> str:
    """Which limit is passed, in words; empty if none is, as far as is known.

    Args:
        now: a reading.
        limits: what is allowed.
        reserved_bytes: of memory, promised already and not used yet.

    Example:
        >>> over(Pressure(9.0, None, 2**34), PressureLimits(8.0))
        '9.0 runnable threads a CPU, of at most 8'
    """
    if now.runnable_per_cpu is not None and now.runnable_per_cpu > limits.runnable_per_cpu:
        return f"{now.runnable_per_cpu:.1f} runnable threads a CPU, of at most {limits.runnable_per_cpu:g}"
    if now.memory_bytes is not None and (left := now.memory_bytes - reserved_bytes) < limits.memory_bytes:
        return f"{max(left, 0) / 2**30:.1f} GiB of memory left, of at least {limits.memory_bytes / 2**30:.1f}"
    if now.disk_bytes is not None and now.disk_bytes < limits.disk_bytes:
        return f"{now.disk_bytes / 2**30:.1f} GiB of disk left, of at least {limits.disk_bytes / 2**30:.1f}"
    return ""


@dataclass(frozen=True)
class PressureLimits:
    """Beyond which nothing new starts; see `composer.schema.PoolConfig`."""

    runnable_per_cpu: float = 16.0
    memory_bytes: int = 2**30
    disk_bytes: int = 2**30


def _runnable() -> int:
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("procs_running "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def available_memory_bytes() -> int:
    """Memory that a new process may use: the machine's, or what the container leaves."""
    left = psutil.virtual_memory().available
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((_CGROUP / most).read_text(encoding="ascii"))
            left = min(left, limit - int((_CGROUP / used).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return left


def _scratch() -> str:
    return os.environ.get("TMPDIR") or "/tmp"
