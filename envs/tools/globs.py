"""Glob patterns as regular expressions: what `glob` and `grep` give to the programs in the sandbox.

The result is a POSIX extended regular expression that Python's `re` reads in the same way.
"""

from __future__ import annotations

_SPECIAL = frozenset(".^$+(){}|\\*?[]")


def glob_to_regex(pattern: str) -> str:
    r"""The expression that a whole path, relative to where the search begins, has to match.

    `*` and `?` stop at a slash, `**` does not; `[a-z]`, `[!a-z]` and `{one,other}` are as in a shell. A pattern without
    a slash is looked for in every folder.

    Example:
        >>> glob_to_regex("*.py"), glob_to_regex("src/**/test_?.{py,pyi}")
        ('(.*/)?[^/]*\\.py', 'src/(.*/)?test_[^/]\\.(py|pyi)')
    """
    pattern = pattern.removeprefix("./").lstrip("/")
    anywhere = "" if "/" in pattern else "(.*/)?"
    return anywhere + _translate(pattern)


def _translate(pattern: str) -> str:
    out: list[str] = []
    position, open_braces = 0, 0
    braces_are_closed = _closed_braces(pattern)
    while position < len(pattern):
        character = pattern[position]
        at_start = position == 0 or pattern[position - 1] in "/{,"
        if at_start and pattern.startswith("**/", position):
            out.append("(.*/)?")
            position += 3
            continue
        if pattern.startswith("**", position):
            out.append(".*")
            position += 2
            continue
        if character == "[" and (end := _end_of_class(pattern, position)):
            inside = pattern[position + 1 : end].replace("\\", "\\\\")
            out.append("[^/" + inside[1:] + "]" if inside[0] in "!^" else f"[{inside}]")
            position = end + 1
            continue
        if character == "{" and position in braces_are_closed:
            open_braces += 1
            out.append("(")
        elif character == "}" and open_braces:
            open_braces -= 1
            out.append(")")
        elif character == "," and open_braces:
            out.append("|")
        elif character in "*?":
            out.append("[^/]*" if character == "*" else "[^/]")
        else:
            out.append(f"\\{character}" if character in _SPECIAL else character)
        position += 1
    return "".join(out)


def _end_of_class(pattern: str, start: int) -> int:
    """Where the `]` of a class stands that begins at `start`; 0 if it is none."""
    first = start + 2 if pattern[start + 1 : start + 2] in ("!", "^") else start + 1
    end = pattern.find("]", first + 1)
    return end if end > first and "/" not in pattern[start:end] and "[" not in pattern[first:end] else 0


def _closed_braces(pattern: str) -> set[int]:
    """Positions of the braces that open what another one closes."""
    waiting: list[int] = []
    closed: set[int] = set()
    for position, character in enumerate(pattern):
        if character == "{":
            waiting.append(position)
        elif character == "}" and waiting:
            closed.add(waiting.pop())
    return closed
