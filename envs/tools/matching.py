"""Where an old text stands in a file: exactly, or up to white space that models get wrong. Pure functions on text."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_MAX_COMPARED_LINES = 2000
"""Of a file, when the line nearest to a text is looked for: one comparison takes some 50 microseconds."""
_MAX_COMPARED_CHARACTERS = 200
_LEAST_RATIO = 0.6


@dataclass(frozen=True)
class Match:
    """One place in a text, and what to put there."""

    start: int
    end: int
    """In characters; exclusive."""
    replacement: str


def exact_matches(text: str, old: str, new: str, most: int | None = None) -> list[Match]:
    """The places where `old` stands.

    Args:
        text: where to look.
        old: not empty.
        new: what the matches put in its place.
        most: how many places to find, of which some may overlap, so that none goes unseen; None: all that do not.
    """
    step = len(old) if most is None else 1
    return [Match(start, start + len(old), new) for start in islice(_occurrences(text, old, step), most)]


def loose_matches(text: str, old: str, new: str, most: int | None = None) -> list[Match]:
    """The places where the lines of `old` stand up to white space at their ends and a common indentation.

    Only whole lines are found. `new` is moved to the indentation of the place; empty lines around `old` are ignored,
    with as many around `new`. Arguments as of `exact_matches`.
    """
    old_lines, new_lines = old.split("\n"), new.split("\n")
    while len(old_lines) > 1 and not old_lines[0].strip():
        old_lines.pop(0)
        if len(new_lines) > 1 and not new_lines[0].strip():
            new_lines.pop(0)
    while len(old_lines) > 1 and not old_lines[-1].strip():
        old_lines.pop()
        if len(new_lines) > 1 and not new_lines[-1].strip():
            new_lines.pop()
    wanted = [line.strip() for line in old_lines]
    if not any(wanted):
        return []
    lines = text.split("\n")
    stripped = [line.strip() for line in lines]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    old_indent = _indent(old_lines)
    found: list[Match] = []
    first, step = -1, 1
    while most is None or len(found) < most:
        first = _next_window(stripped, wanted, first + step)
        if first < 0:
            break
        step = 1
        window = lines[first : first + len(wanted)]
        indent = _indent(window)
        if _relative(window, indent) == _relative(old_lines, old_indent):
            replacement = "\n".join(_moved(line, old_indent, indent) for line in new_lines)
            found.append(Match(starts[first], starts[first + len(wanted)] - 1, replacement))
            step = len(wanted) if most is None else 1
    return found


def apply(text: str, matches: list[Match]) -> str:
    """The text with every match replaced; matches are in order and do not overlap."""
    pieces, position = [], 0
    for match in matches:
        pieces += [text[position : match.start], match.replacement]
        position = match.end
    return "".join([*pieces, text[position:]])


def nearest_line(text: str, old: str) -> tuple[int, str] | None:
    """The line of `text` that is most like the first line of `old` that holds anything: number from 1, and the line.

    None if no line is like it. Only the beginning of a very long file is looked at.
    """
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")[:_MAX_COMPARED_CHARACTERS]
    best: tuple[int, str] | None = None
    least = _LEAST_RATIO
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    for number, line in enumerate(text.split("\n", _MAX_COMPARED_LINES)[:_MAX_COMPARED_LINES], 1):
        candidate = line.strip()[:_MAX_COMPARED_CHARACTERS]
        if candidate == wanted:
            return number, line
        matcher.set_seq1(candidate)
        if matcher.real_quick_ratio() > least and matcher.quick_ratio() > least and (ratio := matcher.ratio()) > least:
            least, best = ratio, (number, line)
    return best


def line_number(text: str, position: int) -> int:
    """The number, from 1, of the line in which a position lies."""
    return text.count("\n", 0, position) + 1


def _occurrences(text: str, old: str, step: int) -> Iterator[int]:
    start = text.find(old)
    while start >= 0:
        yield start
        start = text.find(old, start + step)


def _next_window(lines: list[str], wanted: list[str], start: int) -> int:
    """Where `wanted` next stands in `lines`, from `start` on; -1 if nowhere."""
    for first in range(start, len(lines) - len(wanted) + 1):
        if lines[first] == wanted[0] and lines[first : first + len(wanted)] == wanted:
            return first
    return -1


def _indent(lines: list[str]) -> str:
    """The white space with which all lines begin that hold anything."""
    indents = [line[: len(line) - len(line.lstrip())] for line in lines if line.strip()]
    first, last = min(indents), max(indents)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:common]


def _relative(lines: list[str], indent: str) -> list[str]:
    return [line[len(indent) :].rstrip() if line.strip() else "" for line in lines]


def _moved(line: str, old_indent: str, indent: str) -> str:
    if not line.strip():
        return ""
    # A line that stands further left than all of `old` begins where the place begins.
    return indent + (line[len(old_indent) :] if line.startswith(old_indent) else line.lstrip())
