"""What a live backend leaves on disk, and how to know that its owner has gone.

    <runtime folder>/composer-sandbox-<uid>/<label>.<pid>.<start time>/
        backend.json    the control groups and the watchdog
        lock            locked (flock) by the owner and its watchdog for as long as one of them lives
        root/           mount point, empty as seen from outside the fork server

The lock is the test of life: the kernel drops it when the last holder dies, also by kill -9, and it does not mistake
another process with the same number for the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def runtime_folder() -> Path:
    """Where this user's backends keep their state: a folder that nobody else may write to.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = (base if base.is_dir() else Path(tempfile.gettempdir())) / f"composer-sandbox-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or folder.is_symlink() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder of this user that nobody else may write to")
    return folder


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; 0 if there is no such process."""
    try:
        # The name, in parentheses, may contain anything: fields are counted from its end (proc_pid_stat(5), field 22).
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def remove_leftovers(state: str, control_groups: list[str], patience_s: float = 5.0) -> bool:
    """Remove a dead backend's control groups and its state folder; false if a process in them will not end."""
    deadline = time.monotonic() + patience_s
    for folder in control_groups:
        while not _remove_group(Path(folder)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    shutil.rmtree(state, ignore_errors=True)
    return True


def _remove_group(folder: Path) -> bool:
    """Remove a control group with its children, killing what is in them."""
    try:
        groups = [*(path for path in folder.iterdir() if path.is_dir()), folder]
    except FileNotFoundError:
        return True
    for group in groups:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            group.rmdir()
    return not folder.exists()


@dataclass
class State:
    """The state folder of one live backend."""

    folder: Path
    name: str
    lock: int
    """File descriptor of the locked file."""

    @classmethod
    def create(cls, label: str) -> State:
        """Make a folder for this process and lock it.

        Raises:
            OSError: the runtime folder cannot be used.
        """
        clean = re.sub(r"[^A-Za-z0-9_-]", "-", label)[:40] or "run"
        pid = os.getpid()
        stem = f"{clean}.{pid}.{start_time(pid)}"
        for number in range(10_000):
            name = stem if number == 0 else f"{stem}.{number}"
            folder = runtime_folder() / name
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "root").mkdir()
            return cls(folder, name, lock)
        raise FileExistsError(f"{runtime_folder()} holds 10000 backends of this process")

    def record(self, fields: dict[str, Any]) -> None:
        """Write down what a sweep has to remove."""
        (self.folder / "backend.json").write_text(json.dumps(fields))

    def remove(self) -> None:
        """Remove the folder and let go of the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def sweep() -> int:
    """Remove what backends left behind whose owners were killed; never touches a live one's.

    Returns:
        How many backends were cleaned up after.
    """
    try:
        folders = list(runtime_folder().iterdir())
    except OSError:
        return 0
    return sum(_sweep(folder) for folder in folders)


def _sweep(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Between mkdir and lock there is a moment; a folder that has been like this for a minute is a dead one's.
        with contextlib.suppress(OSError):
            if _age(folder) > 60:
                shutil.rmtree(folder)
                return True
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return _clean(folder)
    finally:
        os.close(lock)


def _age(folder: Path) -> float:
    return time.time() - folder.stat().st_mtime


def _clean(folder: Path) -> bool:
    fields: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        fields = json.loads((folder / "backend.json").read_text())
    watchdog = fields.get("watchdog", 0)
    if watchdog and start_time(watchdog) == fields.get("watchdog_start"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(watchdog, signal.SIGKILL)
    return remove_leftovers(str(folder), fields.get("control_groups", []))
