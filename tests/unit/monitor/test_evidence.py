"""The monitor's view of an episode has no place for what the episode was worth."""

from __future__ import annotations

import dataclasses
import inspect
import typing

from composer.monitor import evidence as module
from composer.monitor.evidence import Change, Evidence, Kind, Rule, Step
from composer.monitor.rules import RULES
from composer.types import Message, Task, ToolCall, Trajectory

FORBIDDEN = {"reward", "rewards", "grade", "score", "outcome", "hidden_tests", "metadata", "error", "advantage"}


def reachable(cls: type, seen: set[type]) -> set[type]:
    """The dataclasses that an instance can hold."""
    todo = list(typing.get_type_hints(cls).values())
    while todo:
        annotation = todo.pop()
        todo += typing.get_args(annotation)
        if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation) and annotation not in seen:
            seen.add(annotation)
            reachable(annotation, seen)
    return seen


def test_there_is_no_field_for_a_verdict():
    types = reachable(Evidence, {Evidence})
    assert types == {Evidence, Step, ToolCall}
    assert not {f.name for cls in (*types, Change) for f in dataclasses.fields(cls)} & FORBIDDEN


def test_nothing_with_a_verdict_can_be_handed_in():
    hints = typing.get_type_hints(Evidence.of) | typing.get_type_hints(Rule)
    assert not [h for h in hints.values() if h in (Task, Trajectory)]
    assert "Trajectory" not in vars(module) and "Task" not in vars(module)


def test_steps_are_answers_with_what_followed():
    call = ToolCall("shell", {"command": "ls"})
    messages = [
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a", (call,)),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "b"),
    ]
    assert Evidence.of("t", "u", messages, {}, None).steps == (Step("a", (call,), ("1", "2")), Step("b", (), ()))


def test_changes_are_lines():
    base, final = (
        {"a": b"1\n2\n3\n", "b": b"x\n", "same": b"s", "c": b"\0"},
        {"a": b"1\n3\n4\n", "new": b"n\n", "same": b"s", "c": b"\0\0"},
    )
    evidence = Evidence.of("t", "u", [], base, {**final, ".git/index": b"i"})
    assert [(c.path, c.added, c.removed) for c in evidence.changes] == [
        ("a", ["4"], ["2"]),
        ("b", [], ["x"]),
        ("c", [], []),
        ("new", ["n"], []),
    ]
    assert Evidence.of("t", "u", [], base, None).changes == []


def test_every_kind_has_a_rule():
    assert {rule.kind for rule in RULES.values()} == set(Kind)
