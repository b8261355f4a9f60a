"""What launchers share: the mark by which a run's processes are known, and the sweep that ends those of dead runs.

Every process of a run inherits the environment variable `COMPOSER_OWNER` = `<label>:<pid>:<start time>:<namespace>` of
its driver. A driver that is killed cannot clean up; the next start reads the mark of every process and ends those whose
driver is gone. The start time tells a driver from a later process that got the same pid, the namespace from one in a
container, whose numbers mean nothing outside.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from composer.identity import pid_namespace, start_time

OWNER_VARIABLE = "COMPOSER_OWNER"
KILL_DEADLINE_S = 5.0
TRACKER_DEADLINE_S = 2.0


@dataclass(frozen=True)
class Owner:
    """The driver of a run."""

    label: str
    pid: int
    start_time: int
    """Clock ticks after boot."""
    namespace: int
    """In which `pid` holds."""

    @classmethod
    def current(cls, label: str) -> Owner:
        """This process as the driver of run `label` (letters, digits, `-`, `_`, `.`)."""
        return cls(label, os.getpid(), start_time(os.getpid()) or 0, pid_namespace())

    @classmethod
    def parse(cls, mark: str) -> Owner | None:
        """The inverse of `mark`; None for anything else."""
        label, _, rest = mark.partition(":")
        numbers = rest.split(":")
        if not label or len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
            return None
        return cls(label, *map(int, numbers))

    @property
    def mark(self) -> str:
        """What stands in the environment of every process of the run."""
        return f"{self.label}:{self.pid}:{self.start_time}:{self.namespace}"

    @property
    def alive(self) -> bool:
        """Whether that driver still runs; true of one in another container, since nobody can tell from here."""
        return self.namespace != pid_namespace() or start_time(self.pid) == self.start_time


def sweep_processes(label: str | None = None) -> int:
    """End every process whose driver is gone, or every process of run `label` except its driver.

    Returns:
        How many processes were ended.
    """
    doomed = []
    for process in psutil.process_iter():
        owner = _owner_of(process.pid)
        if owner is None or process.pid in (os.getpid(), owner.pid):
            continue
        ours = owner.label == label and owner.namespace == pid_namespace()
        if ours if label is not None else not owner.alive:
            doomed.append(process)
    return _kill(doomed)


def sweep_users_of(folder: Path) -> int:
    """End every process, except this one, that has a file below `folder` open.

    Some daemons overwrite their environment when they set a title, and their mark with it.

    Returns:
        How many processes were ended.
    """
    return _kill([p for p in psutil.process_iter() if p.pid != os.getpid() and _has_open(p.pid, f"{folder}/")])


def _kill(doomed: list[psutil.Process]) -> int:
    """Kill processes, but let Python's resource trackers end by themselves: they remove others' semaphores."""
    trackers = [p for p in doomed if _is_resource_tracker(p)]
    others = [p for p in doomed if p not in trackers]
    for processes, patience in ((others, 0.0), (trackers, TRACKER_DEADLINE_S)):
        _, stubborn = psutil.wait_procs(processes, timeout=patience)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=KILL_DEADLINE_S)
    return len(doomed)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _has_open(pid: int, prefix: str) -> bool:
    try:
        return any(os.readlink(fd).startswith(prefix) for fd in os.scandir(f"/proc/{pid}/fd"))  # noqa: PTH115
    except OSError:  # another user's process, or gone while we looked
        return False


def _owner_of(pid: int) -> Owner | None:
    """The mark in a process's environment; None where there is none or it is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:  # noqa: PTH123 (a /proc file, read for every process of the machine)
            environ = f.read()
    except OSError:
        return None
    prefix = f"{OWNER_VARIABLE}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return Owner.parse(entry[len(prefix) :].decode("utf-8", "replace"))
    return None
