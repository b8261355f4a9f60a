"""What the fork server knows of its children."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Running:
    """One sandbox, as the fork server sees it."""

    name: str
    request: dict[str, Any]
    channel: int
    attach: tuple[int, ...]
    members: int
    monitor: int
    """bwrap's process."""
    stdin: int
    """Write end of PID 1's standard input: it lives until this closes."""
    output: int
    info: int
    egress: int
    """Socket to the egress proxy; -1 without one."""
    deadline: float
    init_pid: int = 0
    supervisor: int = 0
    init_pidfd: int = -1
    text: bytes = b""
    reason: str = ""
    alive: set[int] = field(default_factory=set)
    """Children of ours that have not been reaped."""


@dataclass
class Job:
    """A layer that is being made, or written to an archive."""

    number: int
    """Of the owner."""
    op: str
    snapshot: str
    deadline: float
    is_wanted: bool = True
