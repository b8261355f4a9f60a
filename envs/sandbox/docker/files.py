"""Files of a container, by commands that its own user runs in it: so the kernel decides what may be read and written.

No path is resolved outside the container, neither here nor in the engine, whose own way of copying files has been led
astray by links before. What the commands print is untrusted: a program of the same user could have written it, and so
could have written the files.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import tarfile
import time
from collections.abc import Mapping
from typing import BinaryIO, cast

from envs.sandbox.docker.shell import quoted, take_payload

IS_FOLDER, IS_SPECIAL = 121, 122
"""Exit codes: the path is a folder; a pipe, a socket or a block device."""
TOO_LARGE = 153
"""Exit code of what SIGXFSZ ended."""
PATH_MAX = 4096
MAX_ENTRIES = 100_000
"""Files, folders and anything else that `collected` looks at."""
_ERRORS = {
    os.strerror(number): number
    for number in (
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
        errno.ETXTBSY,
    )
} | {  # as dash and musl say it
    "No such file": errno.ENOENT,
    "Directory nonexistent": errno.ENOENT,
    "nonexistent directory": errno.ENOENT,
    "Symbolic link loop": errno.ELOOP,
    "Filename too long": errno.ENAMETOOLONG,
}

_LOOK = b"""\
if [ -d %(path)s ]; then exit 121; fi
if [ -e %(path)s ] && ! [ -f %(path)s ] && ! [ -c %(path)s ]; then exit 122; fi
"""
_READ = _LOOK + b"head -c %(max_bytes)d <%(path)s"
_WRITE = (
    b"%(payload)s | (\n(\n"
    + _LOOK
    + b"""\
mkdir -p -- %(folder)s && head -c %(num_bytes)d >%(path)s
)
code=$?
cat >/dev/null
exit $code
)"""
)


def read_command(path: str, max_bytes: int) -> bytes:
    """A command that prints the first bytes of a file, or why not. `path` is absolute."""
    return b"(\n" + _READ % {b"path": quoted(path), b"max_bytes": max_bytes} + b"\n)"


def write_command(path: str, num_bytes: int) -> bytes:
    """A command that writes its payload to a file, making its folders, or prints why not. `path` is absolute."""
    return _WRITE % {
        b"path": quoted(path),
        b"folder": quoted(posixpath.dirname(path)),
        b"num_bytes": num_bytes,
        b"payload": take_payload(num_bytes).encode(),
    }


def unpack_command(num_bytes: int) -> bytes:
    """A command that unpacks its payload, an archive of paths relative to the root directory."""
    take = take_payload(num_bytes).encode()
    return take + b" | ( tar -C / -xpf - 2>&1; code=$?; cat >/dev/null; exit $code )"


def collect_command(folder: str) -> bytes:
    """A command that prints an archive of a folder; exit code 121: it is none."""
    word = quoted(folder)
    # tar complains about what its user may not read, and goes on.
    return b"( if [ -L %b ] || ! [ -d %b ]; then exit 121; fi; tar -C %b -cf - . 2>/dev/null )" % (word, word, word)


def pack_command(places: list[str]) -> bytes:
    """A command that prints an archive of folders, with paths relative to the root directory."""
    return b"tar -C / -cf - " + b" ".join(quoted(place.strip("/")) for place in places) + b" 2>/dev/null"


def error_of(exit_code: int, output: bytes, path: str) -> OSError:
    """What a command that failed has said, as an error."""
    if exit_code == IS_FOLDER:
        number = errno.EISDIR
    elif exit_code == IS_SPECIAL:
        number = errno.EACCES
    elif exit_code == TOO_LARGE:
        number = errno.EFBIG
    else:
        number = errno_of(output) or errno.EIO
    return OSError(number, os.strerror(number), path)


def errno_of(output: bytes) -> int:
    """The error that the last line names which names one; 0 if none does."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        said = line.rpartition(": ")[2].strip()
        if said in _ERRORS:
            return _ERRORS[said]
    return 0


def archive(files: Mapping[str, bytes], workdir: str) -> tuple[BinaryIO, int]:
    """An archive of files in a new working directory, with paths relative to the root directory, and its size."""
    buffer, now = io.BytesIO(), int(time.time())
    # The one format that busybox reads as well, with names of any length.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        made = {posixpath.normpath(workdir).strip("/"): None}
        for path in files:
            place = posixpath.normpath(posixpath.join(workdir, path))
            folders = []
            while (place := posixpath.dirname(place)).strip("/"):
                folders.append(place.strip("/"))
            # What lies above the working directory is there.
            made |= dict.fromkeys(f for f in reversed(folders) if f.startswith(f"{workdir.strip('/')}/"))
        for folder in made:
            info = tarfile.TarInfo(folder)
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, now
            tar.addfile(info)
        for path, content in files.items():
            info = tarfile.TarInfo(posixpath.normpath(posixpath.join(workdir, path)).strip("/"))
            info.size, info.mode, info.mtime = len(content), 0o644, now
            tar.addfile(info, io.BytesIO(content))
    size = buffer.tell()
    buffer.seek(0)
    return buffer, size


class _Bounded(io.RawIOBase):
    """Lets a reader have so many bytes and no more, since it believes what an archive says of its own sizes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.allowance = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self.allowance:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self.allowance -= size
        return self._file.read(size)


def collected(file: BinaryIO, folder: str, max_bytes: int) -> dict[str, bytes]:
    """The regular files of an archive that `collect_command` printed.

    Args:
        file: the archive; it may be cut, or be none.
        folder: what was collected: a path is to be no longer than can be written there again.
        max_bytes: of names and contents together.

    Raises:
        OSError: EFBIG: there is more.
        ValueError: it is no archive.
    """
    too_much = OSError(errno.EFBIG, os.strerror(errno.EFBIG), folder)
    most = PATH_MAX - len(os.fsencode(folder)) - 2
    bounded = _Bounded(file)
    bounded.allowance = 2**20
    left, num_entries = max_bytes, 0
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=cast(BinaryIO, bounded), mode="r|", encoding="utf-8") as tar:
            while (entry := tar.next()) is not None:
                bounded.allowance = 2**20
                num_entries += 1
                path = entry.name.removeprefix("./")
                if num_entries > MAX_ENTRIES or len(os.fsencode(path)) > most or entry.size > left:
                    raise too_much
                if entry.isreg():
                    bounded.allowance = entry.size + 2**20
                    part = tar.extractfile(entry)
                    found[path] = part.read() if part is not None else b""
                elif entry.islnk() and (first := entry.linkname.removeprefix("./")) in found:
                    found[path] = found[first]
                else:
                    continue
                # A name counts too: a million empty files are no small answer.
                left -= len(found[path]) + len(os.fsencode(path))
                if left < 0:
                    raise too_much
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - which it would remember for ever
    except tarfile.TarError as e:
        raise ValueError(f"no archive of {folder}: {e}") from e
    return found
