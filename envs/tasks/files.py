"""Reads single files that somebody else wrote: no pipe, no endless file and no bomb holds this process up."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_TEXT_BYTES = 2**20
"""Of a request, an instruction, a file of settings."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file, or of one that a link leads to.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `max_bytes` (EFBIG).
    """
    # Without O_NONBLOCK a pipe that nobody writes to would be waited for, for ever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > max_bytes:
            raise too_large(path, max_bytes)
        with open(fd, "rb", closefd=False) as file:  # noqa: PTH123
            content = file.read(max_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > max_bytes:
        raise too_large(path, max_bytes)
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8, with Unix line ends.

    Raises:
        OSError: as of `read_file`.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_file(path, max_bytes).decode().replace("\r\n", "\n").replace("\r", "\n")


def decompressed(content: bytes, max_bytes: int, path: Path) -> bytes:
    """What gzip made small, unless it has more than `max_bytes`.

    Raises:
        OSError, EOFError, zlib.error: it is damaged, or larger (EFBIG).
    """
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        found = file.read(max_bytes + 1)
    if len(found) > max_bytes:
        raise too_large(path, max_bytes)
    return found


def parse_yaml(text: str) -> Any:
    """YAML without aliases, of which a few hundred bytes can make more than any memory holds.

    Raises:
        yaml.YAMLError: it is none, has an alias, or is nested too deep.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (RecursionError, ValueError, OverflowError) as error:  # such as a number of thousands of digits
        raise yaml.YAMLError(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias (*name) is not read: write its value out", mark)
        return super().compose_node(parent, index)


def too_large(path: Path, max_bytes: int) -> OSError:
    """That a file has more bytes than are read."""
    return OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
