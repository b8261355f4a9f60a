"""Applies unified diffs, as git writes them, to files in memory: no git, no `patch`, no file system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LEFT_OVER = re.compile(rb"\+|-(?!-[- ])")
"""After a hunk: neither the next file nor the signature of a mail."""
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Lines of the old file that give way to others, with their line ends."""

    start: int
    """Line of the old file, from 0."""
    old: list[bytes]
    new: list[bytes]


@dataclass(frozen=True)
class FileDiff:
    """What becomes of one file."""

    old: str | None
    """None: the file is new."""
    new: str | None
    """None: the file goes."""
    hunks: list[Hunk]


def parse_diff(diff: bytes) -> list[FileDiff]:
    """The files of a diff.

    Raises:
        ValueError: it is no unified diff, is of binary files, or names a path outside of the repository.
    """
    lines = diff.splitlines(keepends=True) if b"\r" not in diff else re.findall(rb"[^\n]*\n|[^\n]+", diff)
    files: list[FileDiff] = []
    position, old, new = 0, None, None
    hunks: list[Hunk] = []
    is_open = False

    def close() -> None:
        if is_open and (old is not None or new is not None):
            files.append(FileDiff(old, new, list(hunks)))
        hunks.clear()

    while position < len(lines):
        line = lines[position].rstrip(b"\r\n")
        position += 1
        if line.startswith(b"diff --git "):
            close()
            is_open, (old, new) = True, _paths_of_header(line)
        elif line.startswith(b"new file mode"):
            old = None
        elif line.startswith(b"deleted file mode"):
            new = None
        elif line.startswith((b"rename from ", b"copy from ")):
            old = _path(line.split(b" from ", 1)[1], prefix=False)
        elif line.startswith((b"rename to ", b"copy to ")):
            new = _path(line.split(b" to ", 1)[1], prefix=False)
        elif line.startswith((b"Binary files ", b"GIT binary patch")):
            raise ValueError(f"it changes a binary file ({line.decode(errors='replace')[:80]})")
        elif line.startswith(b"--- ") and position < len(lines) and lines[position].startswith(b"+++ "):
            if hunks or not is_open:
                close()
            is_open, old, new = True, _path(line[4:]), _path(lines[position].rstrip(b"\r\n")[4:])
            position += 1
        elif match := _HUNK.match(line):
            if not is_open:
                raise ValueError(f"line {position} begins a hunk of no file")
            hunk, position = _hunk(lines, position, match)
            hunks.append(hunk)
            if position < len(lines) and _LEFT_OVER.match(lines[position]):
                raise ValueError(f"line {position + 1} is one more than its hunk has by its own count")
    close()
    if not files:
        raise ValueError("it changes no file")
    return files


def apply_diff(diff: bytes, files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """What a diff makes of files: path -> new content, or None for a file that goes.

    Args:
        diff: as of `parse_diff`.
        files: at least those that it changes.

    Raises:
        ValueError: as of `parse_diff`, or it does not fit these files.
    """
    changed: dict[str, bytes | None] = {}
    for file in parse_diff(diff):
        content = b""
        if file.old is not None:
            content = changed.get(file.old, files.get(file.old))
            if content is None:
                raise ValueError(f"it changes {file.old}, which is not there")
            if file.new != file.old:
                changed[file.old] = None
        if file.new is not None:
            changed[file.new] = _patched(content, file)
    return changed


def _patched(content: bytes, file: FileDiff) -> bytes:
    lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
    shift = 0
    for number, hunk in enumerate(file.hunks, start=1):
        start = _find(lines, hunk, hunk.start + shift)
        if start is None:
            raise ValueError(f"hunk {number} of {file.new} does not fit")
        lines[start : start + len(hunk.old)] = hunk.new
        shift = start - hunk.start + len(hunk.new) - len(hunk.old)
    return b"".join(lines)


def _find(lines: list[bytes], hunk: Hunk, expected: int) -> int | None:
    """Where the old lines are, as near as possible to where they should be."""
    last = len(lines) - len(hunk.old)
    for start in _outwards(min(max(expected, 0), max(last, 0)), last):
        if lines[start : start + len(hunk.old)] == hunk.old:
            return start
    return None


def _outwards(middle: int, last: int) -> Iterator[int]:
    for distance in range(last + 1):
        for number in {middle - distance, middle + distance}:
            if 0 <= number <= last:
                yield number


def _hunk(lines: list[bytes], position: int, match: re.Match[bytes]) -> tuple[Hunk, int]:
    start, num_old, _, num_new = (1 if group is None else int(group) for group in match.groups())
    first = start - 1 if num_old else start
    old: list[bytes] = []
    new: list[bytes] = []
    last: list[list[bytes]] = []
    while len(old) < num_old or len(new) < num_new or _is_mark(lines, position):
        if position >= len(lines):
            raise ValueError("its last hunk is cut")
        line = lines[position]
        position += 1
        kind, text = line[:1], line[1:]
        if kind == b"\\":
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        if kind in (b"\n", b"\r"):  # an empty line of context whose blank an editor took away
            kind, text = b" ", line
        last = {b" ": [old, new], b"-": [old], b"+": [new]}.get(kind, [])
        if not last:
            raise ValueError(f"line {position} is no line of a hunk")
        for side in last:
            side.append(text)
    return Hunk(first, old, new), position


def _is_mark(lines: list[bytes], position: int) -> bool:
    return position < len(lines) and lines[position].startswith(_NO_NEWLINE[:2])


def _paths_of_header(line: bytes) -> tuple[str | None, str | None]:
    """Both paths of `diff --git a/x b/x`, if they are the same; other ones are named again below it."""
    names = line.removeprefix(b"diff --git ")
    half = len(names) // 2
    first, second = names[:half], names[half + 1 :]
    if first.removeprefix(b"a/") == second.removeprefix(b"b/") and first:
        return _path(first), _path(second)
    return None, None


def _path(name: bytes, prefix: bool = True) -> str | None:
    name = name.split(b"\t", 1)[0]
    if name.startswith(b'"') and name.endswith(b'"'):
        # git quotes what is not ASCII as in C, byte by byte.
        name = name[1:-1].decode("unicode_escape").encode("latin-1")
    if name == b"/dev/null":
        return None
    path = name.decode(errors="surrogateescape")
    if prefix and path[:2] in ("a/", "b/"):
        path = path[2:]
    p = PurePosixPath(path)
    if p.is_absolute() or ".." in p.parts or not p.parts:
        raise ValueError(f"it names {path!r}, which is outside of the repository")
    return path
