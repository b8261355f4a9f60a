"""Limits that no sandbox of either backend can work with: refused before one starts.

The owner's side. What runs beside sandboxes (limits.py) imports nothing of the framework.
"""

from __future__ import annotations

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError

LEAST_MEMORY_BYTES = 32 * 2**20
LEAST_DISK_BYTES = 2**20


def check_limits(limits: SandboxLimits) -> None:
    """Refuse limits that no sandbox can work with.

    Raises:
        SandboxStartError: one of them is too small, or the disk takes too much of the memory.
    """
    for name, least in (
        ("memory_bytes", LEAST_MEMORY_BYTES),
        ("disk_bytes", LEAST_DISK_BYTES),
        ("num_processes", 1),
        ("file_bytes", 1),
        ("cpu_seconds", 1),
        ("output_bytes", 1),
    ):
        value = getattr(limits, name)
        if value < least:
            raise SandboxStartError(f"{name}={value} is too small for a sandbox: at least {least}")
    if limits.disk_bytes > limits.memory_bytes // 2:
        # With all of its memory full of files, a sandbox would end when its next command starts.
        raise SandboxStartError(
            f"disk_bytes={limits.disk_bytes} lies in memory, with what runs: at most half of "
            f"memory_bytes={limits.memory_bytes}"
        )
    for name in ("exec_timeout_s", "lifetime_s"):
        if not getattr(limits, name) > 0:
            raise SandboxStartError(f"{name}={getattr(limits, name)} must be above 0")
