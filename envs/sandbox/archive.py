"""The file that a snapshot is saved to: a tar archive of a note and of one tar archive a layer, the oldest first.

Only the owner reads and writes the outer archive. Those inside hold what programs in a sandbox have made: they are
written by the fork server, and read in a sandbox again (layers.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from composer.errors import SandboxError

_FORMAT = "composer-bubblewrap-snapshot-1"
_NOTE = "snapshot.json"
_LARGEST_NOTE = 2**16


def pack(path: Path, layers: Sequence[IO[bytes]]) -> None:
    """Write the file: whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    note = json.dumps({"format": _FORMAT, "layers": len(layers)}).encode()
    try:
        with tarfile.open(partial, "w") as archive:
            _add(archive, _NOTE, io.BytesIO(note), len(note))
            for number, layer in enumerate(layers):
                size = layer.seek(0, os.SEEK_END)
                layer.seek(0)
                _add(archive, f"{number}.tar", layer, size)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, content)


@contextlib.contextmanager
def unpacked(path: Path, max_bytes: int) -> Iterator[list[IO[bytes]]]:
    """The layers of a file, each in a temporary file that is at its start.

    Args:
        path: the file. It may be of anybody's making: nothing of it is decompressed or filled up with zeros.
        max_bytes: of all layers together, as files on the host's disk.

    Raises:
        OSError: it cannot be read.
        SandboxError: it is no saved snapshot, or holds more than `max_bytes`.
    """
    with contextlib.ExitStack() as stack:
        try:
            if path.stat().st_size > max_bytes + _LARGEST_NOTE * 2:
                raise ValueError(f"it has {path.stat().st_size} bytes, and {max_bytes} are the most")
            archive = stack.enter_context(tarfile.open(path, "r:"))
            note = json.loads(_content(archive, _NOTE, _LARGEST_NOTE).read())
            if note["format"] != _FORMAT:
                raise ValueError(f"its format is {note['format']!r:.80}")
            if int(note["layers"]) < 1:
                raise ValueError("it has no layer")
            layers, left = [], max_bytes
            for number in range(int(note["layers"])):
                layer = stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
                shutil.copyfileobj(_content(archive, f"{number}.tar", left), layer)
                left -= layer.tell()
                layer.seek(0)
                layers.append(layer)
        except (tarfile.TarError, ValueError, KeyError, TypeError) as e:
            raise SandboxError(f"{path} is no saved snapshot of a bubblewrap sandbox ({e}): give another file") from e
        yield layers


def _content(archive: tarfile.TarFile, name: str, most: int) -> IO[bytes]:
    member = archive.getmember(name)
    if not member.isreg() or member.issparse():
        raise ValueError(f"{name} is no plain file")
    if member.size > most:
        raise ValueError(f"{name} has {member.size} bytes, and {most} are left for it")
    content = archive.extractfile(member)
    assert content is not None
    return content
