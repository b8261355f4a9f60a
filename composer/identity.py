"""Which process is meant: its number is used again after its end, and another container counts from 1 as well."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None if there is no such process or only its zombie is left.

    Field 22 of /proc/<pid>/stat (proc_pid_stat(5)), counted from the end of the name, which may contain anything.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """The namespace in which this process's numbers hold: of those in another, nobody here can say if they live."""
    return Path("/proc/self/ns/pid").stat().st_ino
