"""A command with what it prints when the environment works, and what makes a proposed one unfit.

Fit is what a developer runs and what the repository answers: a command whose output stands in itself, or that looks at
nothing, or that prints something else tomorrow, says nothing about an environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import regex

from composer.contract import ExecResult

_PATTERN_TIMEOUT_S = 2.0
"""A model's regular expression may take exponential time."""
PRINTED = ". It printed:\n"
"""Between what a run lacks and what it said."""
_MAX_SHOWN = 1500
_SHOW_OR_MOVE = """
    : . [ alias basename cat cd chmod cp cut date dirname du echo env exit export false file find grep head hostname id
    less ln ls mkdir mv nl printf ps pwd readlink realpath rm sed seq set sleep sort source stat tail tee test touch tr
    tree true type uname uniq wc which whoami
"""
_TRIVIAL = frozenset(_SHOW_OR_MOVE.split())
_WRAPPERS = frozenset(("command", "env", "exec", "nice", "nohup", "time", "timeout"))
_INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*$")
_CHANGES = re.compile(r"\$RANDOM|\b(?:shuf|uuidgen|mktemp)\b|/dev/u?random|\bdate\b")
_VOLATILE = {
    "a duration": re.compile(r"\b\d+(?:\.\d+)?\s?(?:s|ms|us|µs|ns|sec|secs|seconds?|minutes?)\b(?!/)"),
    "a date": re.compile(r"\b\d{4}-\d\d-\d\d\b"),
    "a time of day": re.compile(r"\b\d\d:\d\d:\d\d\b"),
    "an address in memory": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
    "a temporary path": re.compile(r"/tmp/"),
}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "minLength": 1,
            "maxLength": 500,
            "pattern": "^[^\\u0000\\n]*$",
            "description": "one line for sh, run in the repository's folder on a fresh machine, for itself",
        },
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 300, "pattern": "^[^\\u0000\\n]*$"},
            "maxItems": 20,
            "description": "each must be part of a line of the output",
        },
        "pattern": {
            "type": "string",
            "maxLength": 300,
            "pattern": "^[^\\u0000]*$",
            "description": "a regular expression that must be found in the output; empty if `lines` say enough",
        },
        "exit_code": {"type": "integer", "minimum": 0, "maximum": 125},
        "why": {"type": "string", "minLength": 1, "maxLength": 500, "description": "what it shows when it works"},
    },
    "required": ["command", "why"],
    "additionalProperties": False,
}
"""JSON schema of one proposed command."""


@dataclass(frozen=True)
class Command:
    """A command line, and what it has to print and to exit with."""

    command: str
    why: str
    lines: tuple[str, ...] = ()
    """Each is part of a line of the output; runs of white space count as one blank."""
    pattern: str = ""
    exit_code: int = 0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Command:
        """From what fits `SCHEMA`."""
        return cls(
            d["command"].strip(), d["why"], tuple(d.get("lines", ())), d.get("pattern", ""), d.get("exit_code", 0)
        )

    def to_dict(self) -> dict[str, Any]:
        """What fits `SCHEMA`, and YAML."""
        return asdict(self) | {"lines": list(self.lines)}

    def difference(self, result: ExecResult) -> str:
        """What a run of it lacks, in words for the installer; empty if it has all that is expected."""
        missing = self.missing(result)
        if not missing:
            return ""
        shown = _text(result)
        if len(shown) > _MAX_SHOWN:
            shown = f"{shown[: _MAX_SHOWN // 2]}\n[...]\n{shown[-_MAX_SHOWN // 2 :]}"
        return f"{'; '.join(missing)}{PRINTED}{shown or '(nothing)'}"

    def missing(self, result: ExecResult) -> list[str]:
        """What a run of it lacks, one by one."""
        if result.timed_out:
            return [f"it was stopped after {result.seconds:.0f} s"]
        output = _text(result)
        missing = []
        if result.exit_code != self.exit_code:
            missing.append(f"exit code {result.exit_code} in place of {self.exit_code}")
        have = [_squeezed(line) for line in output.splitlines()]
        missing += [f"no line with {line!r}" for line in self.lines if not any(_squeezed(line) in h for h in have)]
        if self.pattern and not _found(self.pattern, output):
            missing.append(f"nothing matches {self.pattern!r}")
        return missing


def unfit(command: Command, others: Iterable[Command] = ()) -> str:
    """Why a proposed command is refused before it has run; empty if it is not.

    Args:
        command: the command.
        others: those that were accepted already.
    """
    words = _words(command.command)
    if words is None:
        return "its quotes are not closed"
    if any(_words(other.command) == words for other in others):
        return "it was proposed already"
    named = programs(command.command)
    if not named or all(PurePosixPath(name).name in _TRIVIAL for name in named):
        return "it is trivial: it runs neither the repository's program nor a tool on it"
    if not command.lines and not command.pattern:
        return "it expects no output: give `lines` or a `pattern`"
    if not any(segment for segment in words if not {"--version", "-V", "--help"} & set(segment)):
        return "it only asks for a version or for help, which says nothing about the repository"
    if command.pattern:
        try:
            if _found(command.pattern, ""):
                return f"its pattern {command.pattern!r} matches an empty output"
            if not command.lines and _found(command.pattern, command.command):
                return "its pattern matches the command itself"
        except regex.error as error:
            return f"its pattern {command.pattern!r} is no regular expression ({error})"
    if command.lines and all(_squeezed(line) in _squeezed(command.command) for line in command.lines):
        return "its expected output stands in the command itself"
    if match := _CHANGES.search(command.command):
        return f"it is not deterministic: {match.group()!r} is different every time"
    for line in command.lines:
        for what, pattern in _VOLATILE.items():
            if match := pattern.search(line):
                return f"it is not deterministic: {match.group()!r} in {line!r} is {what}; leave it out"
    return ""


def programs(command: str) -> list[str]:
    """The programs that a command line names, as they are named, in order.

    Example:
        >>> programs("cd lib && CC=gcc make -s | tail -1; timeout 9 python3 -m pytest > out")
        ['cd', 'make', 'tail', 'python3']
    """
    return [name for segment in _words(command) or [] if (name := _program(segment)[0])]


def modules(command: str) -> list[str]:
    """The top-level modules that a command line runs by `python -m`.

    Example:
        >>> modules("python3 -W error -m pytest.console -q; python -m build")
        ['pytest', 'build']
    """
    found = []
    for segment in _words(command) or []:
        name, rest = _program(segment)
        if _INTERPRETER.match(PurePosixPath(name).name) and "-m" in rest[:-1]:
            found.append(rest[rest.index("-m") + 1].partition(".")[0])
    return found


def _program(segment: list[str]) -> tuple[str, list[str]]:
    """The program of a simple command, and its arguments."""
    rest = list(segment)
    while rest and (re.match(r"[A-Za-z_]\w*=", rest[0]) or rest[0] in _WRAPPERS or rest[0] == "!"):
        if rest.pop(0) in _WRAPPERS:
            while rest and (rest[0].startswith("-") or rest[0][0].isdigit()):
                rest.pop(0)
    return (rest[0], rest[1:]) if rest else ("", [])


def _words(command: str) -> list[list[str]] | None:
    """The words of each simple command in a command line, without redirections; None if it is no shell's."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    segments: list[list[str]] = [[]]
    try:
        skip = False
        for word in lexer:
            if set(word) <= set("();<>|&"):
                skip = bool(set(word) & set("<>"))
                if not skip:
                    segments.append([])
            elif skip:
                skip = False
            else:
                segments[-1].append(word)
    except ValueError:
        return None
    return [segment for segment in segments if segment]


def _found(pattern: str, text: str) -> bool:
    """Whether a pattern is found; one that takes too long is not.

    Raises:
        regex.error: it is no regular expression.
    """
    try:
        return regex.search(pattern, text, regex.MULTILINE, timeout=_PATTERN_TIMEOUT_S) is not None
    except TimeoutError:
        return False


def _text(result: ExecResult) -> str:
    return _ESCAPES.sub("", result.output.decode(errors="replace")).replace("\r\n", "\n").strip()


def _squeezed(line: str) -> str:
    return " ".join(line.split())
