"""A run directory: claimed once, never overwritten, locked while its driver lives, resumed only when it can be.

The lock is the kernel's (`flock`): it ends with the process that holds it, also after `kill -9`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import yaml

from composer.config import CONFIG_FILE, PLAN_FILE
from composer.errors import ConfigError, MachineError, ResumeError
from composer.shell import pasteable

_LOCK_FILE, _STATUS_FILE = "driver.lock", "status.json"
_FIRST_FILES = (".hydra", "composer.log", CONFIG_FILE, PLAN_FILE, _LOCK_FILE, _STATUS_FILE)


class Status(StrEnum):
    """How far a run is. `running` without a live driver means that the driver was killed."""

    running = "running"
    interrupted = "interrupted"
    failed = "failed"
    finished = "finished"


class RunDirectory:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or made."""
        self.path = Path(path)

    @property
    def status(self) -> Status | None:
        """What the driver last wrote; None before the first start."""
        try:
            return Status(json.loads((self.path / _STATUS_FILE).read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def set_status(self, status: Status) -> None:
        """Write the status, atomically; a full disk is no reason to fail a run that is otherwise well."""
        data = {"status": status.value, "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        half = self.path / f"{_STATUS_FILE}.tmp"
        with contextlib.suppress(OSError):
            half.write_text(json.dumps(data), encoding="utf-8")
            half.replace(self.path / _STATUS_FILE)

    def note_what_is_left(self, error: BaseException) -> None:
        """Let an error that ended a run say where its logs are and how to go on, if anything was begun."""
        if (self.path / "logs").is_dir():
            error.add_note(f"the processes' own logs are in {self.path / 'logs'}")
        if self.path.is_dir() and not _is_unused(self.path):
            resume = pasteable("composer", f"resume={self.path}")
            error.add_note(f"what is finished is kept; continue with: {resume}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory as its driver.

        Raises:
            ResumeError: another driver holds it.
            MachineError: the lock cannot be written.
        """
        try:
            handle = (self.path / _LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise MachineError(
                f"{self.path} cannot be written ({error.strerror}): free space or change run_root"
            ) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResumeError(
                    f"resume={self.path}: this run is still alive ({self._holder()}); wait for it, or end it "
                    "with Ctrl-C"
                ) from None
            handle.seek(0)
            handle.truncate()
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            yield

    def check_resumable(self, *, starts: bool = True) -> None:
        """Refuse what cannot be continued.

        Args:
            starts: the run is to go on; otherwise its files are only read.

        Raises:
            ResumeError: no such directory, not a run's, or, if it is to go on, alive or finished.
        """
        if not self.path.is_dir():
            near = _newest_runs(self.path.parent)
            meant = f"; the newest runs there are {', '.join(near)}" if near else ""
            raise ResumeError(f"resume={self.path}: no such directory: give the directory of a run{meant}")
        if not (self.path / CONFIG_FILE).is_file() or not (self.path / PLAN_FILE).is_file():
            if any(self.path.glob(f"*/{PLAN_FILE}")):
                jobs = ", ".join(sorted(str(p.parent) for p in self.path.glob(f"*/{PLAN_FILE}"))[-3:])
                raise ResumeError(f"resume={self.path}: this holds several runs: give one of them, such as {jobs}")
            raise ResumeError(
                f"resume={self.path}: not a run directory (no {PLAN_FILE} in it): give the directory that "
                "a run printed when it started"
            )
        if not starts:
            return
        with self.lock():
            pass
        if self.status is Status.finished:
            raise ResumeError(f"resume={self.path}: this run is finished: look at its summary.json, or start a new run")

    def _holder(self) -> str:
        try:
            return (self.path / _LOCK_FILE).read_text(encoding="utf-8") or "its process is unknown"
        except OSError:
            return "its process is unknown"


def check_free(wanted: Path, *, chosen_as: str | None) -> None:
    """Refuse a directory that cannot become a run's, whoever may write there. Makes nothing.

    Args:
        wanted: its path.
        chosen_as: the key with which the user chose it, if it is not the default; then it has to be empty or new.

    Raises:
        ConfigError: a part of the path is a file, or the user's directory holds something already.
    """
    with contextlib.suppress(OSError):  # what cannot be looked at cannot be written either, and `claim` says so
        for path in wanted.absolute().parents:
            if path.exists() and not path.is_dir():
                raise ConfigError(chosen_as or "run_root", str(wanted), f"{path} is a file: choose a folder")
        empty = wanted.is_dir() and not any(wanted.iterdir())
        if chosen_as is None or empty or not (wanted.exists() or wanted.is_symlink()):
            return
        resumable = (wanted / PLAN_FILE).is_file()
        instead = f", or `{pasteable('composer', f'resume={wanted}')}`" if resumable else ""
        remedy = f"exists, and a run directory is never overwritten: choose one that does not exist{instead}"
        raise ConfigError(chosen_as, str(wanted), remedy)


def claim(wanted: Path, *, chosen_as: str | None) -> Path:
    """Make a directory that nobody had before.

    Args:
        wanted: its path; if it is taken, `-2`, `-3`, … is added.
        chosen_as: the key with which the user chose it; then it may exist if it is empty, and is never renamed.

    Raises:
        ConfigError: as `check_free`.
        MachineError: it cannot be made.
    """
    check_free(wanted, chosen_as=chosen_as)
    wanted = wanted.absolute()
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for i in range(1, 1000):
            path = wanted if i == 1 else wanted.with_name(f"{wanted.name}-{i}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                if chosen_as is None:
                    continue
                check_free(path, chosen_as=chosen_as)
                return path
    except OSError as error:
        raise MachineError(
            f"{wanted} cannot be made ({error.strerror}): free space, or set run_root to a folder you may write to"
        ) from None
    raise MachineError(f"{wanted} and 998 names like it are taken: tidy up {wanted.parent}")


def remove_unused(path: Path, *, keep: bool = False) -> bool:
    """Remove a directory that this start claimed, if it holds nothing but what every start writes first.

    Args:
        path: the directory, which was empty or not there before.
        keep: the user had made it, so it is only emptied.

    Returns:
        Whether nothing of the start is left.
    """
    if not _is_unused(path):
        return False
    if not keep:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    for entry in list(path.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return not any(path.iterdir())


def _is_unused(path: Path) -> bool:
    return path.is_dir() and all(entry.name.removesuffix(".tmp") in _FIRST_FILES for entry in path.iterdir())


def _newest_runs(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    runs = [p.parent for p in folder.glob(f"*/{PLAN_FILE}")]
    return [str(p) for p in sorted(runs, key=lambda p: p.stat().st_mtime, reverse=True)[:3]]


def find_plugins(run_dir: Path) -> None:
    """Let plugins be imported from the folder in which the run was started, also where it is resumed from another."""
    with contextlib.suppress(OSError, yaml.YAMLError, KeyError, TypeError):
        written = yaml.safe_load((run_dir / ".hydra" / "hydra.yaml").read_text(encoding="utf-8"))
        folder = str(written["hydra"]["runtime"]["cwd"])
        if folder not in sys.path:
            sys.path.insert(0, folder)
