"""Limits of a sandbox, and what bounds what.

With control groups (version 1 or 2, `memory` and `pids`; the default, exact):
    memory_bytes    cgroup, all processes and the sandbox's files together (its writable layer lives in memory)
    num_processes   cgroup; the backend's own processes come on top (`OVERHEAD_PROCESSES`)
    file_bytes      RLIMIT_FSIZE of every process
    disk_bytes      size of the one tmpfs below the overlay, minus what /dev/shm gets (`shm_bytes`)
    cpu_seconds     RLIMIT_CPU of every process; all of them together are bounded by the lifetime
    exec_timeout_s, output_bytes    the supervisor (programs.py)
    lifetime_s      the fork server, which kills the sandbox whatever its owner does

Without writable control groups, for ordinary users (`Watch`): RLIMIT_NPROC, counted per user namespace (Linux 5.14),
bounds num_processes exactly; RLIMIT_AS = memory_bytes bounds each process exactly, and the supervisor adds up the
resident memory of all processes every `WATCH_INTERVAL_S` while anything runs and kills them all when the sum, plus
the tmpfs's pages, is over memory_bytes: the overshoot is what the machine can fault in during one interval.
memfd_create and System V shared memory, which neither would see, are refused in this mode.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OVERHEAD_PROCESSES = 4
"""bwrap's monitor, the sandbox's PID 1, the supervisor, and the persistent shell."""
WATCH_INTERVAL_S = 0.02

_OPEN_FILES = 1024
_ROOT = Path("/sys/fs/cgroup")
_V1_CONTROLLERS = ("memory", "pids", "cpuacct")


class LimitError(Exception):
    """A limit cannot be applied. The message names the limit and the remedy."""


def shm_bytes(disk_bytes: int) -> int:
    """The share of `disk_bytes` that /dev/shm gets: a quarter, at most 64 MiB (Docker's default)."""
    return min(disk_bytes // 4, 64 * 2**20)


def apply_rlimits(limits: dict[str, int], watched: bool, pid: int = 0) -> None:
    """Bound a child of the supervisor (0: the caller is it) and its descendants, before it runs anything of others."""

    def bound(which: int, value: int, grace: int = 0) -> None:
        resource.prlimit(pid, which, (value, value + grace))

    bound(resource.RLIMIT_CORE, 0)
    bound(resource.RLIMIT_FSIZE, limits["file_bytes"])
    # At the soft limit the program gets SIGXCPU, which it may catch; a second later comes SIGKILL.
    bound(resource.RLIMIT_CPU, limits["cpu_seconds"], 1)
    bound(resource.RLIMIT_NOFILE, min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if watched:
        bound(resource.RLIMIT_AS, limits["memory_bytes"])
        bound(resource.RLIMIT_NPROC, limits["num_processes"] + OVERHEAD_PROCESSES)


def resident_bytes(proc: int, pids: set[int]) -> int:
    """Resident memory of processes; a page that several share counts once for each, so the sum errs upwards.

    Args:
        proc: directory descriptor of a procfs whose numbers `pids` are.
        pids: the processes; those that have ended count nothing.
    """
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fd = os.open(f"{pid}/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            try:
                pages += int(os.read(fd, 256).split()[1])
            finally:
                os.close(fd)
    return pages * resource.getpagesize()


class MemoryWatch:
    """Adds up what a sandbox uses where no control group does."""

    def __init__(self, proc: int, members: Callable[[], set[int]], memory_bytes: int) -> None:
        """Called inside the sandbox.

        Args:
            proc: directory descriptor of a procfs whose numbers `members` gives.
            members: all processes of the sandbox.
            memory_bytes: what they may use, the files on the sandbox's tmpfs included.
        """
        self._proc, self._members, self._memory_bytes = proc, members, memory_bytes
        self.peak_bytes = 0

    def is_over(self) -> bool:
        """Look now; remembers the peak."""
        used = resident_bytes(self._proc, self._members())
        for path in ("/", "/dev/shm"):
            disk = os.statvfs(path)
            used += (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self.peak_bytes = max(self.peak_bytes, used)
        return used > self._memory_bytes


def members_of(listed: int, proc: int) -> set[int]:
    """The processes of a control group, in the caller's PID namespace.

    Args:
        listed: descriptor of the group's `cgroup.procs`, from `ControlGroup.open_members`.
        proc: directory descriptor of a procfs in which the caller is.
    """
    with open(os.open(f"self/fd/{listed}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:  # noqa: PTH123
        return {int(pid) for pid in file.read().split()}


@dataclass(frozen=True)
class Usage:
    """What a control group has used."""

    peak_memory_bytes: int
    cpu_seconds: float
    num_processes: int


_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
"""By version: where the kernel counts the processes that it has killed."""
_PEAK_AND_LIMIT = ("memory.max_usage_in_bytes", "memory.limit_in_bytes")
"""Of version 1."""
_ONE_CHARGE = 4 * 2**20
"""More than a process asks for at a time: a huge page has 2 MiB."""


class ControlGroup:
    """The control groups of one sandbox: one directory a controller (version 1), or one in all (version 2)."""

    def __init__(self, folders: list[Path], version: int) -> None:
        """`folders` exist; in version 1 their order is memory, pids, cpuacct."""
        self.folders, self._version = folders, version

    def limit(self, memory_bytes: int, num_processes: int) -> None:
        """Write the limits, and read them back.

        Raises:
            LimitError: the kernel did not take one.
        """
        memory, pids = self.folders[0], self.folders[min(1, len(self.folders) - 1)]
        if self._version == 1:
            self._set("memory_bytes", memory / "memory.limit_in_bytes", memory_bytes)
            # Memory and swap together; the file is there only where swap is accounted for.
            self._set("memory_bytes", memory / "memory.memsw.limit_in_bytes", memory_bytes, optional=True)
        else:
            self._set("memory_bytes", memory / "memory.max", memory_bytes)
            self._set("memory_bytes", memory / "memory.swap.max", 0, optional=True)
        self._set("num_processes", pids / "pids.max", num_processes + OVERHEAD_PROCESSES)

    def allow_another(self) -> None:
        """Raise the limit for one more process of the backend's own.

        Raises:
            OSError: the group is gone.
        """
        file = self.folders[min(1, len(self.folders) - 1)] / "pids.max"
        file.write_text(str(int(file.read_text()) + 1))

    @staticmethod
    def _set(limit: str, file: Path, value: int, optional: bool = False) -> None:
        if optional and not file.exists():
            return
        try:
            file.write_text(str(value))
            # The kernel rounds memory down to whole pages.
            page = resource.getpagesize()
            if int(file.read_text()) not in (value, value // page * page):
                raise LimitError(f"{limit}={value} did not take effect: {file} says {file.read_text().strip()}")
        except (OSError, ValueError) as e:
            raise LimitError(f"{limit}={value} cannot be applied through {file}: {e}") from e

    def open_for_attach(self) -> list[int]:
        """File descriptors into which a process writes "0" to join. In version 1, `tasks` spares a global lock."""
        name = "tasks" if self._version == 1 else "cgroup.procs"
        return [os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def open_members(self) -> int:
        """A descriptor of the list of processes, for `members_of`.

        It has to be opened anew for each look: version 1 repeats the list of the first read for a second. And it is no
        directory, from which a way would lead up to the host's file system.
        """
        return os.open(self.folders[min(1, len(self.folders) - 1)] / "cgroup.procs", os.O_PATH | os.O_CLOEXEC)

    def usage(self) -> Usage:
        """What was used so far.

        Raises:
            OSError: the group is gone.
        """
        memory, pids = self.folders[0], self.folders[min(1, len(self.folders) - 1)]
        if self._version == 1:
            peak = int((memory / "memory.max_usage_in_bytes").read_text())
            cpu = int((self.folders[2] / "cpuacct.usage").read_text()) / 1e9
        else:
            file = memory / "memory.peak"  # Linux 5.19
            peak = int((file if file.exists() else memory / "memory.current").read_text())
            stat = dict(line.split() for line in (memory / "cpu.stat").read_text().splitlines())
            cpu = int(stat["usage_usec"]) / 1e6
        return Usage(peak, cpu, len((pids / "cgroup.procs").read_text().split()))

    def was_robbed(self) -> bool:
        """Whether the kernel has killed one of its processes for memory that others use: its own limit was never met.

        Of a group that is gone, that is not known.
        """
        memory = self.folders[0]
        try:
            events = dict(line.split() for line in (memory / _EVENTS[self._version]).read_text().splitlines())
            if not int(events.get("oom_kill", 0)):
                return False
            if self._version == 2:
                return not int(events["oom"])
            # Counters of failures stay 0 where swap is accounted for. What could not be charged is not in the peak.
            peak, most = (int((memory / name).read_text()) for name in _PEAK_AND_LIMIT)
            return peak < most - _ONE_CHARGE
        except OSError:
            return False

    def remove(self) -> bool:
        """Remove the directories; false if processes in them have not quite ended yet."""
        return all([_remove(folder) for folder in self.folders])


def _make(folder: Path) -> None:
    """Make a group's directory; the supervisor, which is not root, lists the processes in it whatever our umask is."""
    folder.mkdir()
    folder.chmod(0o755)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class ControlGroups:
    """Finds where this process may make control groups, and makes one directory there for a backend."""

    def __init__(self, version: int, parents: list[Path], name: str) -> None:
        """Use `find`."""
        self._version = version
        self.folders = [parent / name for parent in parents]

    @classmethod
    def find(cls, name: str) -> ControlGroups:
        """Look for the place, nothing is made yet.

        Args:
            name: of the backend's own directory.

        Raises:
            LimitError: there is none; the message says why and what to do.
        """
        own = _own_paths()
        try:
            v1 = [_v1_parent(controller, own) for controller in _V1_CONTROLLERS]
            if all(v1):
                return cls(1, [parent for parent in v1 if parent], name)
            return cls(2, [_v2_parent(own.get("", "/"))], name)
        except OSError as e:
            raise LimitError(f"memory_bytes and num_processes cannot be applied: {e}; {_REMEDY}") from e

    def create(self) -> None:
        """Make the backend's directory.

        Raises:
            LimitError: it cannot be made.
        """
        try:
            for folder in self.folders:
                _make(folder)
            if self._version == 2:
                (self.folders[0] / "cgroup.subtree_control").write_text("+memory +pids")
        except OSError as e:
            raise LimitError(f"memory_bytes and num_processes cannot be applied: {e}; {_REMEDY}") from e

    def group(self, name: str, memory_bytes: int, num_processes: int) -> ControlGroup:
        """Make and limit a sandbox's group.

        Raises:
            LimitError: a limit cannot be applied.
        """
        group = ControlGroup([folder / name for folder in self.folders], self._version)
        try:
            for folder in group.folders:
                _make(folder)
            group.limit(memory_bytes, num_processes)
        except OSError as e:
            group.remove()
            raise LimitError(f"memory_bytes={memory_bytes} cannot be applied: {e}; {_REMEDY}") from e
        except LimitError:
            group.remove()
            raise
        return group


_REMEDY = (
    "run as root, or start the command inside a delegated control group: "
    "systemd-run --user --scope -p Delegate=yes <command>"
)


def _own_paths() -> dict[str, str]:
    """Controller -> this process's path in its hierarchy; "" stands for version 2."""
    paths = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _v1_parent(controller: str, own: dict[str, str]) -> Path | None:
    root = _ROOT / controller
    # Below our own group, so that limits from outside go on holding; the hierarchy's root where that is not visible.
    for parent in (root / own.get(controller, "/").lstrip("/"), root):
        if (parent / "cgroup.procs").exists() and os.access(parent, os.W_OK):
            return parent
    return None


def _v2_parent(own: str) -> Path:
    """The nearest ancestor of our own group that hands `memory` and `pids` down and that we may write to."""
    if not (_ROOT / "cgroup.controllers").exists():
        raise LimitError(
            f"memory_bytes and num_processes cannot be applied: {_ROOT} has no writable control groups "
            f"with memory and pids; {_REMEDY}"
        )
    here = _ROOT / own.lstrip("/")
    for parent in (here, *here.parents):
        if not parent.is_relative_to(_ROOT) or not parent.exists():
            continue
        handed_down = (parent / "cgroup.subtree_control").read_text().split()
        if {"memory", "pids"} <= set(handed_down) and os.access(parent, os.W_OK):
            return parent
    if here.exists() and os.access(here / "cgroup.subtree_control", os.W_OK):
        _empty_into_leaf(here)
        return here
    raise LimitError(
        f"memory_bytes and num_processes cannot be applied: no control group above {here} is writable; {_REMEDY}"
    )


def _empty_into_leaf(group: Path) -> None:
    """Move a delegated group's processes to a child of it: a group with processes cannot hand controllers down."""
    leaf = group / "composer.main"
    try:
        leaf.mkdir(exist_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
        (group / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as e:
        raise LimitError(f"memory_bytes and num_processes cannot be applied: {e}; {_REMEDY}") from e
