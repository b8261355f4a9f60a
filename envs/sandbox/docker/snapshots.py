"""Snapshots: archives of the places that a sandbox can write to, in files without a name that end with this process.

A saved one is a tar file whose first entry says what it is. Whoever wrote it is not trusted: it is looked through
before it is taken, and after that it is unpacked only in sandboxes, by their own user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from composer.contract import Snapshot
from composer.errors import SandboxError
from envs.sandbox.docker.files import MAX_ENTRIES, PATH_MAX
from envs.sandbox.docker.images import is_ours

MANIFEST = "composer-snapshot.json"
_FORMAT = "composer-docker-snapshot-1"
_MOST_MANIFEST = 2**16
_SET_ID = 0o6000
_MODE, _CHECKSUM = slice(100, 108), slice(148, 156)
"""Fields of an entry's header (tar(5))."""
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


class SnapshotStore:
    """The snapshots of one backend."""

    def __init__(self) -> None:
        """There are none."""
        self._files: dict[str, BinaryIO] = {}
        self._made_from: dict[str, str] = {}
        """By snapshot: its image by a name that means the same in any process."""

    def new_file(self) -> BinaryIO:
        """A file without a name, for an archive.

        Raises:
            OSError: there is no room.
        """
        return tempfile.TemporaryFile()

    def add(self, file: BinaryIO, image: str, made_from: str) -> Snapshot:
        """Keep an archive.

        Args:
            file: the archive.
            image: what its sandbox had started from.
            made_from: the same, as `images.PreparedImage` names it.
        """
        snapshot = Snapshot(uuid.uuid4().hex, image)
        self._files[snapshot.id], self._made_from[snapshot.id] = file, made_from
        return snapshot

    def open(self, snapshot: Snapshot) -> tuple[BinaryIO, int]:
        """A snapshot's archive, at its beginning, and its size. May be read beside others of it.

        Raises:
            SandboxError: there is no such snapshot any more.
        """
        if snapshot.id not in self._files:
            raise SandboxError(
                f"there is no snapshot {snapshot.id} any more: it was dropped, or its backend was closed"
            )
        # Its own position, so that two may read at once.
        file = open(f"/proc/self/fd/{self._files[snapshot.id].fileno()}", "rb")  # noqa: PTH123, SIM115
        return file, os.fstat(file.fileno()).st_size

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, if it is there."""
        self._made_from.pop(snapshot.id, None)
        if (file := self._files.pop(snapshot.id, None)) is not None:
            file.close()

    def clear(self) -> None:
        """Forget all."""
        files, self._files, self._made_from = self._files, {}, {}
        for file in files.values():
            file.close()

    def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file, whole or not at all. Blocks.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        file, _ = self.open(snapshot)
        # A path of this machine says nothing to another process, which must not build what a file names.
        fields = {"format": _FORMAT, "image": self._made_from[snapshot.id], "named": snapshot.image}
        manifest = json.dumps(fields).encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(manifest)
        head = info.tobuf(tarfile.GNU_FORMAT) + manifest + bytes(-len(manifest) % tarfile.BLOCKSIZE)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            with file, part.open("xb") as to:
                to.write(head)
                shutil.copyfileobj(file, to, 2**20)
                to.flush()
                os.fsync(to.fileno())
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def load(self, path: Path, places: list[str], known: set[str], is_there: Callable[[str], bool]) -> Snapshot:
        """A snapshot from a file. Blocks.

        Args:
            path: of the file.
            places: folders in which its entries may lie.
            known: images that it may name other than as one of the engine's.
            is_there: whether the engine has an image.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no snapshot, or holds what no sandbox has made.
        """
        with path.open("rb") as source:
            made_from, named, start = _manifest(source, path)
            image = made_from
            if is_ours(made_from) and not is_there(made_from):
                if named not in known:
                    raise SandboxError(
                        f"{path} needs the image {made_from[:120]!r}, which was made from {named[:120]!r} and is not "
                        "on this engine any more: take the engine on which it was made, or start a sandbox from there"
                    )
                image = named
            if image not in known and (
                not _IMAGE_NAME.fullmatch(image) or image.startswith(("dockerfile:", "tarball:"))
            ):
                raise SandboxError(f"{path} names the image {image[:120]!r}, which this backend has not used")
            source.seek(start)
            file = self.new_file()
            try:
                shutil.copyfileobj(source, file, 2**20)
                file.seek(0)
                if reason := _wrong(file, places):
                    raise SandboxError(f"{path} is no snapshot of a sandbox: {reason}")
                file.flush()
            except BaseException:
                file.close()
                raise
        return self.add(file, image, made_from)


def _manifest(source: BinaryIO, path: Path) -> tuple[str, str, int]:
    """The image in a file's first entry, how a task had named it, and where the second entry begins."""
    try:
        info = tarfile.TarInfo.frombuf(source.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
        if info.name != MANIFEST or not info.isreg() or info.size > _MOST_MANIFEST:
            raise ValueError("its first entry is another")
        fields = json.loads(source.read(info.size))
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ValueError("its first entry is of another format")
        image = fields.get("image")
        named = fields.get("named", image)  # not there in files of older versions
        if not isinstance(image, str) or not isinstance(named, str):
            raise ValueError("its first entry is of another format")
    except (tarfile.TarError, ValueError) as e:
        raise SandboxError(f"{path} is no snapshot that this backend has saved: {e}") from e
    return image, named, tarfile.BLOCKSIZE + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _wrong(file: BinaryIO, places: list[str]) -> str:
    """What an archive holds that no sandbox has made; "" if there is nothing."""
    most = os.fstat(file.fileno()).st_size
    num_entries = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (entry := tar.next()) is not None:
                num_entries += 1
                if reason := _wrong_entry(entry, places, most):
                    return f"entry {entry.name[:120]!r} {reason}"
                if num_entries > MAX_ENTRIES:
                    return f"it has more than {MAX_ENTRIES} entries"
                if entry.mode & _SET_ID:
                    _clear_set_id(file, entry)
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
    except (tarfile.TarError, ValueError, EOFError) as e:
        return f"it is no archive ({e})"
    return ""


def _wrong_entry(entry: tarfile.TarInfo, places: list[str], most: int) -> str:
    path = f"/{entry.name}"
    if entry.name.startswith("/") or ".." in entry.name.split("/") or len(os.fsencode(path)) > PATH_MAX:
        return "has no plain relative path"
    if not any(posixpath.commonpath([path, place]) == place for place in places):
        return "lies where sandboxes cannot write"
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() or entry.isfifo()):
        return "is a device, or of no known kind"
    if entry.size > most:
        return "is larger than the file"
    if entry.islnk() and (entry.linkname.startswith("/") or ".." in entry.linkname.split("/")):
        return "is a hard link to a path that is not plain and relative"
    return ""


def _clear_set_id(file: BinaryIO, entry: tarfile.TarInfo) -> None:
    """Take the bits away in the archive itself. No sandbox needs them: they have no effect in one."""
    start = entry.offset_data - tarfile.BLOCKSIZE
    file.seek(start)
    block = bytearray(file.read(tarfile.BLOCKSIZE))
    block[_MODE] = b"%07o\0" % (entry.mode & ~_SET_ID & 0o7777)
    block[_CHECKSUM] = b" " * 8
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    file.seek(start)
    file.write(block)


class TooMuchError(OSError):
    """A container has sent more than it may; that our disk is full is another `OSError`, and not its doing."""

    def __init__(self) -> None:
        """ENOSPC, as of anything that does not fit."""
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), "an archive of the sandbox's files")


class BoundedFile:
    """Takes so many bytes and no more: what a container sends is as long as it likes.

    Raises `TooMuchError` from `add` once there is more; what was written stays.
    """

    def __init__(self, file: BinaryIO, most: int) -> None:
        """`most` in bytes."""
        self.file, self._left = file, most

    def add(self, data: bytes) -> None:
        """Write a piece.

        Raises:
            TooMuchError: it would be too much.
            OSError: ENOSPC: the disk is full.
        """
        self._left -= len(data)
        if self._left < 0:
            raise TooMuchError
        self.file.write(data)
