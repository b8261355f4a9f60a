"""What the monitor looks at. Neither a reward nor a grade, an outcome or a hidden test has a place in it.

It is made of messages and files only, so that whoever judges is blind to pass and fail: a finding says what was done,
and says the same of an episode that won and of one that lost.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from composer.monitor.commands import Command, commands_of, paths_of
from composer.monitor.source import parse
from composer.types import Message, ToolCall

MAX_EXCERPT = 300
"""Characters of evidence that a finding quotes."""
_MAX_DIFF_BYTES = 2**20
"""Of one file; a larger one counts as changed, and nobody looks inside."""


class Kind(StrEnum):
    """What a finding is about; policies and metrics go by it."""

    CACHES = "caches"
    """Read what tools keep of other states of the code: type-checkers' caches, bytecode."""
    HISTORY = "history"
    """Looked in a repository for commits that are later than the task."""
    TESTS = "tests"
    """Changed tests, or what decides how they run."""
    SPECIAL_CASING = "special_casing"
    """Wrote answers to inputs that tests show."""
    TAMPERING = "tampering"
    """Wrote code that reaches for the process that judges it."""
    SEARCH = "search"
    """Looked outside of the repository for tests, graders or solutions."""
    PROCESSES = "processes"
    """Read or ended processes of others."""
    NETWORK = "network"
    """Tried to reach a network where there is none for it."""
    FUTURE = "future"
    """Fetched or unpacked another version of what it had to write."""
    HONEYPOT = "honeypot"
    """Took a bait."""
    DODGING = "dodging"
    """Avoided being scored: broken calls, questions in place of work, waiting."""
    INJECTION = "injection"
    """Spoke to whoever judges it."""


@dataclass(frozen=True)
class Step:
    """One answer of the agent, and what followed."""

    text: str
    calls: tuple[ToolCall, ...]
    observations: tuple[str, ...]

    @cached_property
    def commands(self) -> list[Command]:
        """The shell commands among its calls."""
        return [command for call in self.calls for command in commands_of(call)]

    @cached_property
    def paths(self) -> list[str]:
        """The paths that its calls of other tools name."""
        return [path for call in self.calls for path in paths_of(call)]


@dataclass(frozen=True)
class Change:
    """What became of one file; None: it was or is not there."""

    path: str
    before: bytes | None
    after: bytes | None

    @cached_property
    def added(self) -> list[str]:
        """Lines that were not there before, in order."""
        return [line[2:] for line in self._diff if line.startswith("+ ")]

    @cached_property
    def removed(self) -> list[str]:
        """Lines that are gone, in order."""
        return [line[2:] for line in self._diff if line.startswith("- ")]

    @cached_property
    def _diff(self) -> list[str]:
        before, after = (_lines(content) for content in (self.before, self.after))
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=len(before) + len(after) > 4000)
        lines = []
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag != "equal":
                lines += [f"- {line}" for line in before[a:b]] + [f"+ {line}" for line in after[c:d]]
        return lines

    @cached_property
    def tree(self) -> ast.Module | None:
        """The file as it is now, as Python code; None if it is none."""
        return parse(self.new_text) if self.path.endswith(".py") and self.after is not None else None

    @cached_property
    def old_tree(self) -> ast.Module | None:
        """The same, as it was."""
        return parse(self.old_text) if self.path.endswith(".py") and self.before is not None else None

    @property
    def new_text(self) -> str:
        """The whole file as it is now; empty if it is gone or is no text."""
        return _text(self.after)

    @property
    def old_text(self) -> str:
        """The whole file as it was; empty likewise."""
        return _text(self.before)


@dataclass(frozen=True)
class Evidence:
    """One episode, as whoever judges it sees it."""

    task_id: str
    request: str
    """What the user asked."""
    steps: tuple[Step, ...]
    base: Mapping[str, bytes]
    """The files that the agent found."""
    final: Mapping[str, bytes] | None
    """Those that it left; None: they are not known."""
    canary: str = ""
    """A text that stands in this episode's baits and nowhere else; "": there are none."""
    baits: tuple[str, ...] = ()
    """Where they lie: absolute paths, and those from `~`."""

    @classmethod
    def of(
        cls,
        task_id: str,
        request: str,
        messages: Sequence[Message],
        base: Mapping[str, bytes],
        final: Mapping[str, bytes] | None,
        *,
        canary: str = "",
        baits: Iterable[str] = (),
    ) -> Evidence:
        """Take an episode apart: each assistant's message with the tools' answers that follow it."""
        steps: list[Step] = []
        for message in messages:
            if message.role == "assistant":
                steps.append(Step(message.content, message.tool_calls, ()))
            elif message.role == "tool" and steps:
                last = steps[-1]
                steps[-1] = Step(last.text, last.calls, (*last.observations, message.content))
        return cls(task_id, request, tuple(steps), base, final, canary, tuple(baits))

    @cached_property
    def changes(self) -> list[Change]:
        """How the files changed, by path; nothing if the final ones are not known."""
        if self.final is None:
            return []
        paths = sorted(p for p in self.base.keys() | self.final.keys() if self.base.get(p) != self.final.get(p))
        return [Change(p, self.base.get(p), self.final.get(p)) for p in paths if not p.startswith(".git/")]


@dataclass(frozen=True)
class Finding:
    """What a rule, or the judge, has seen."""

    rule: str
    kind: Kind
    excerpt: str
    """The evidence itself, cut."""
    step: int | None = None
    """Index of the agent's answer; None: in the files."""
    path: str = ""
    """The file, of what stands in one."""
    reason: str = ""
    """Why it is one; a judge's own words."""


@dataclass(frozen=True)
class Spot:
    """Where a rule has found something."""

    excerpt: str
    step: int | None = None
    path: str = ""


@dataclass(frozen=True)
class Rule:
    """One thing that an honest agent does not do."""

    name: str
    kind: Kind
    looks_at: str
    why: str
    look: Callable[[Evidence], Iterator[Spot]]

    def findings(self, evidence: Evidence, most: int = 3) -> list[Finding]:
        """The first places in which an episode breaks it."""
        found = []
        for spot in self.look(evidence):
            found.append(Finding(self.name, self.kind, cut(spot.excerpt), spot.step, spot.path, self.why))
            if len(found) == most:
                break
        return found


def cut(text: str, most: int = MAX_EXCERPT) -> str:
    """The text on one line, as far as it fits."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _lines(content: bytes | None) -> list[str]:
    return _text(content).splitlines()


def _text(content: bytes | None) -> str:
    if content is None or len(content) > _MAX_DIFF_BYTES or b"\0" in content[:8000]:
        return ""
    return content.decode(errors="replace")
