"""Files and folders that somebody untrusted has made, and may be at just now. Runs in the supervisor, as their user."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator

_PATH_MAX = 4096
_MAX_ENTRIES = 100_000
"""Files, folders and anything else that `files` looks at; the default disk has room for half as many."""


def walk(top: str) -> Iterator[str]:
    """Paths of the regular files below a folder, relative to it; what its user may not look into is left out.

    Without recursion, and bounded: who made the tree may have made it as deep and as wide as they liked, and a program
    of theirs may still be at it.

    Raises:
        OSError: there is no such folder; or a path is too long to be written again, or there are too many (EFBIG).
    """
    os.close(os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    most = _PATH_MAX - len(os.fsencode(top)) - 2  # the slash, and the NUL at the end
    waiting, num_entries = [""], 0
    while waiting:
        folder = waiting.pop()
        folders = []
        for entry in sorted(_entries(os.path.join(top, folder)), key=lambda entry: entry.name):  # noqa: PTH118
            path = os.path.join(folder, entry.name)  # noqa: PTH118
            num_entries += 1
            if num_entries > _MAX_ENTRIES or len(os.fsencode(path)) > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), top)
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    yield path
        waiting += reversed(folders)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, _MAX_ENTRIES + 1))
    except OSError:
        return []


def make_folders(path: str) -> None:
    """As `os.makedirs`, which is recursive."""
    missing = []
    while not os.path.isdir(path):  # noqa: PTH112
        missing.append(path)
        path = os.path.dirname(path)  # noqa: PTH120
    for folder in reversed(missing):
        try:
            os.mkdir(folder)  # noqa: PTH102
        except FileExistsError:
            if not os.path.isdir(folder):  # noqa: PTH112 - `..` is one
                raise


def _open(path: str, flags: int) -> int:
    """Open a regular file or a character device. Non-blocking, so that a FIFO cannot hold the supervisor up."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISCHR(mode):
        return fd
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EACCES
    raise OSError(number, os.strerror(number), path)


def read_file(path: str, max_bytes: int, flags: int) -> bytes:
    """The first bytes of a file.

    Raises:
        OSError: it cannot be opened, or is no file that can be read without waiting.
    """
    fd = _open(path, os.O_RDONLY | flags)
    chunks, left = [], max_bytes
    try:
        while left > 0 and (chunk := os.read(fd, min(left, 2**20))):
            chunks.append(chunk)
            left -= len(chunk)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
    return b"".join(chunks)


def write_file(path: str, content: bytes, max_bytes: int) -> None:
    """Write a file that has a folder.

    Raises:
        OSError: it cannot be opened or written; EFBIG: it would have more than `max_bytes`.
    """
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
