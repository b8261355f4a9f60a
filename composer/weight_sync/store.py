"""A directory of published weight versions: written once, whole or not at all, and removed when its owner is gone.

    composer-<label>/             in /dev/shm, or on a file system that all machines see
        owner.json                who cleans up: process id, its start time, host and boot
        v00000012/                one version; appears by a rename, complete
            manifest.json         tensors, checksums, probe
            weights-00000.safetensors ...

Newer versions supersede older ones: a reader takes the newest complete one and never waits for one that was skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from composer.errors import WeightSyncError
from composer.identity import pid_namespace, start_time
from composer.types import Probe

FORMAT = 1
"""Of the manifest. A reader refuses any other."""
PREFIX = "composer-"
"""Directories that `sweep` looks at."""
SHARED_MEMORY = Path("/dev/shm")
EMPTY_GRACE_S = 60.0
"""A directory without owner is a start that was killed in between, if it is older than this."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what it looks like."""

    file: str
    shape: list[int]
    dtype: str
    """A torch name: float32, bfloat16."""


@dataclass(frozen=True)
class FileInfo:
    """What a file must be."""

    bytes: int
    blake2b: str
    """Checksum of its content, 32 bytes in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a version."""

    version: int
    tensors: dict[str, TensorInfo]
    """By Hugging Face name."""
    files: dict[str, FileInfo]
    probe: Probe
    format: int = FORMAT


def checksum(path: Path) -> str:
    """BLAKE2b of a file, 32 bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a version.

    Raises:
        WeightSyncError: it is missing, damaged, or of another format.
    """
    path = directory / "manifest.json"
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise WeightSyncError(
                f"manifest={str(path)!r}: it has format {raw['format']!r}, this version of composer reads {FORMAT}; "
                "use one version of composer for trainer and generators"
            )
        return Manifest(
            version=raw["version"],
            tensors={name: TensorInfo(**t) for name, t in raw["tensors"].items()},
            files={name: FileInfo(**f) for name, f in raw["files"].items()},
            probe=Probe(**raw["probe"]),
        )
    except FileNotFoundError as e:
        raise WeightSyncError(f"manifest={str(path)!r}: no such version; it was superseded, load the newest one") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise WeightSyncError(f"manifest={str(path)!r}: it is damaged ({e}); publish the version again") from e


def default_directory(label: str) -> Path:
    """Where the versions of a run lie in shared memory. `label` is unique among runs of this machine.

    Raises:
        WeightSyncError: the label is no plain name.
    """
    if not re.fullmatch(r"[\w.-]+", label):
        raise WeightSyncError(
            f"label={label!r}: it names a directory in {SHARED_MEMORY}; use letters, digits, '.', '_' and '-'"
        )
    return SHARED_MEMORY / f"{PREFIX}{label}"


class VersionStore:
    """The versions in one directory."""

    def __init__(self, directory: Path, keep_versions: int) -> None:
        """Use `create` or `open`."""
        self.directory, self.keep_versions = directory, keep_versions

    @classmethod
    def create(cls, directory: str | Path, keep_versions: int = 2, owner_pid: int | None = None) -> VersionStore:
        """Make a store, in place of what a dead owner left there.

        Args:
            directory: of the store; its parents are made.
            keep_versions: how many versions stay; older ones are removed after each publish.
            owner_pid: the process whose end makes the store a leftover; this one if absent.

        Raises:
            WeightSyncError: a live process owns the directory, or it cannot be written.
        """
        directory = Path(directory)
        owner = _owner(directory)
        if owner and _is_alive(owner) and owner["pid"] != os.getpid():
            raise WeightSyncError(
                f"weight_sync.directory={str(directory)!r}: process {owner['pid']} on {owner['host']} uses it; "
                "end that run or choose another directory"
            )
        try:
            if owner:
                shutil.rmtree(directory)
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise WeightSyncError(
                    f"weight_sync.directory={str(directory)!r}: it holds other files; choose an empty directory"
                )
            identity = _identity(os.getpid() if owner_pid is None else owner_pid)
            temporary = directory / ".owner.json"
            temporary.write_text(json.dumps(identity))
            temporary.rename(directory / "owner.json")
        except OSError as e:
            raise WeightSyncError(
                f"weight_sync.directory={str(directory)!r}: it cannot be written ({e.strerror or e}); "
                "free space there or choose another directory"
            ) from e
        return cls(directory, keep_versions)

    @classmethod
    def open(cls, directory: str | Path, keep_versions: int = 2) -> VersionStore:
        """A store that another process created.

        Raises:
            WeightSyncError: there is none.
        """
        directory = Path(directory)
        if _owner(directory) is None:
            raise WeightSyncError(
                f"weight_sync.directory={str(directory)!r}: no store there; the run that made it has ended, or "
                "this machine does not see that directory"
            )
        return cls(directory, keep_versions)

    def path(self, version: int) -> Path:
        """Where a version lies, or would."""
        return self.directory / f"v{version:08d}"

    def versions(self) -> list[int]:
        """The complete versions, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(p.name[1:]) for p in self.directory.iterdir() if re.fullmatch(r"v\d{8,}", p.name))
        return []

    def latest(self) -> int | None:
        """The newest complete version; None before the first."""
        return max(self.versions(), default=None)

    def manifest(self, version: int | None = None) -> Manifest:
        """The manifest of a version, by default of the newest.

        Raises:
            WeightSyncError: there is no such version, or it is damaged.
        """
        if version is None:
            version = self.latest()
        if version is None:
            raise WeightSyncError(
                f"weight_sync.directory={str(self.directory)!r}: nothing was published yet; publish first"
            )
        try:
            return read_manifest(self.path(version))
        except WeightSyncError:
            if self.path(version).exists():
                raise
            raise WeightSyncError(
                f"version={version!r}: it is not among the published {self.versions()} in "
                f"{str(self.directory)!r}; load the newest"
            ) from None

    def prune(self) -> None:
        """Remove all but the newest `keep_versions`. Readers that have mapped an older one keep it."""
        for version in self.versions()[: -self.keep_versions]:
            # Renamed first, so that nobody finds half a version.
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path(version).rename(self.directory / f".removed-{version}"))

    def remove(self) -> None:
        """Remove the whole store. Idempotent; raises nothing."""
        shutil.rmtree(self.directory, ignore_errors=True)


def sweep(root: Path = SHARED_MEMORY) -> int:
    """Remove stores below `root` whose owner is dead; a live run's, or one of another machine, is never touched.

    Returns:
        How many were removed.
    """
    removed = 0
    for directory in root.glob(f"{PREFIX}*"):
        owner = _owner(directory)
        if owner is None:
            # No owner: not ours, unless it is an empty directory that a killed start left.
            with contextlib.suppress(OSError):
                entries = [p.name for p in directory.iterdir()]
                if entries in ([], [".owner.json"]) and time.time() - directory.stat().st_mtime > EMPTY_GRACE_S:
                    shutil.rmtree(directory)
                    removed += 1
        elif not _is_alive(owner):
            shutil.rmtree(directory, ignore_errors=True)
            removed += not directory.exists()
    return removed


def manifest_json(manifest: Manifest) -> str:
    """The manifest as written to disk."""
    return json.dumps(asdict(manifest))


def _owner(directory: Path) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads((directory / "owner.json").read_text())
        if isinstance(owner, dict) and {"pid", "start", "namespace", "host", "boot"} <= owner.keys():
            return owner
    return None


def _identity(pid: int) -> dict:
    """A process for ever: its id may be used again, together with its start time it is not."""
    return {
        "pid": pid,
        "start": start_time(pid),
        "namespace": pid_namespace(),
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def _is_alive(owner: dict) -> bool:
    here = _identity(owner["pid"])
    if (owner["host"], owner["namespace"]) != (here["host"], here["namespace"]):
        return True  # on another machine or in another container: nobody can tell from here
    return owner["boot"] == here["boot"] and owner["start"] is not None and owner["start"] == here["start"]
