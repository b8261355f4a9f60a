"""Makes a forged snapshot of a saved one: entries that no sandbox has made are added to its innermost archive."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TYPES = {
    "file": tarfile.REGTYPE,
    "folder": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "character": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "fifo": tarfile.FIFOTYPE,
}


def forge(path: Path, entries: Sequence[Mapping[str, Any]], workdir: str) -> bool:
    """Add the entries; true if they are in the file afterwards.

    Args:
        path: a file that a backend has saved.
        entries: as of `Attack.entries`; {workdir} in a name is where the backend's archive has the working directory.
        workdir: of its sandboxes.
    """
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        contents = [(member, file.read() if file else b"") for member, file in members]
    layers = [member for member, _ in contents if member.name.endswith(".tar") and "/" not in member.name]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in contents:
            if layers and member is layers[-1]:
                content = _with_entries(content, entries, workdir)
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if not layers:
            _add(archive, entries, workdir)
    data = path.read_bytes()
    return all(entry["name"].rpartition("/")[2].encode() in data for entry in entries)


def _with_entries(layer: bytes, entries: Sequence[Mapping[str, Any]], workdir: str) -> bytes:
    buffer = io.BytesIO(layer)
    with tarfile.open(fileobj=buffer, mode="a", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, entries, workdir)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, entries: Sequence[Mapping[str, Any]], workdir: str) -> None:
    for entry in entries:
        info = tarfile.TarInfo(entry["name"].replace("{workdir}", workdir.strip("/")))
        info.type, info.linkname = _TYPES[entry.get("type", "file")], entry.get("target", "")
        info.mode = int(str(entry.get("mode", "644")), 8)
        info.uid = info.gid = int(entry.get("owner", 1000))
        info.devmajor, info.devminor = entry.get("device", (0, 0))
        content = str(entry.get("content", "")).encode()
        info.size = len(content) if info.isreg() else 0
        archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
