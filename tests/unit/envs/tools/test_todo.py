"""The list of what there is to do: its text, its rules, and whose it is."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest

from composer.contract import Sandbox, ToolResult
from composer.types import ToolCall
from envs.tools.todo import Todo, TodoItem

LOOK = {"id": "look", "content": "read the code"}
MEND = {"id": "mend", "content": "mend it", "status": "in_progress"}


class Place:
    """Stands for a sandbox, of which only the identity counts here."""


def place() -> Sandbox:
    return cast("Sandbox", Place())


def call(tool: Todo, where: Sandbox, **arguments: Any) -> ToolResult:
    return asyncio.run(tool.call(arguments, where))


def test_the_list_is_replaced_or_changed() -> None:
    tool, here = Todo(), place()
    assert call(tool, here, items=[LOOK, MEND]).content == "[ ] look: read the code\n[>] mend: mend it"
    changed = call(
        tool, here, items=[{"id": "look", "status": "completed"}, {"id": "test", "content": "run"}], merge=True
    )
    assert changed.content == "[x] look: read the code\n[>] mend: mend it\n[ ] test: run"
    assert call(tool, here, items=[MEND]).content == "[>] mend: mend it"
    assert call(tool, here, items=[{"id": "mend", "status": "cancelled"}], merge=True).content == "[-] mend: mend it"
    assert tool.final(here) == [TodoItem("mend", "mend it", "cancelled")]
    assert call(tool, here, items=[]).content == "(nothing to do)"


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        ([{"id": "new"}], "error: item 'new' is new and needs a content"),
        ([LOOK, LOOK], "error: item 'look' is given twice"),
        ([{"id": str(i), "content": "x"} for i in range(4)], "error: the list would have 4 items, and may have 3"),
        ([{"id": "a", "content": "x", "status": "done"}], "error: items.0.status: 'done' is not one of"),
        ([{"content": "x"}], "error: items.0: 'id' is a required property"),
        ([{"id": "a", "content": "x", "priority": 1}], "error: items.0: Additional properties are not allowed"),
        ("look", "error: items: 'look' is not of type 'array'"),
    ],
)
def test_what_is_refused_changes_nothing(items: Any, shown: str) -> None:
    tool, here = Todo(max_items=3), place()
    call(tool, here, items=[MEND])
    result = call(tool, here, items=items)
    assert not result.ok and result.content.startswith(shown)
    assert tool.final(here) == [TodoItem("mend", "mend it", "in_progress")]


def test_a_lenient_list_makes_do_with_less() -> None:
    tool, here = Todo(strict=False), place()
    items = [{"id": "new"}, {"id": "a", "content": "x", "priority": 1}, {"id": "a", "content": "y"}]
    assert call(tool, here, items=items, color="red").content == "[ ] new: new\n[ ] a: y"


def test_every_episode_has_its_own_and_it_goes_with_the_sandbox() -> None:
    tool, here, there = Todo(), place(), place()
    call(tool, here, items=[LOOK])
    call(tool, there, items=[MEND])
    assert [item.id for item in tool.final(here)] == ["look"]
    assert [item.id for item in tool.final(there)] == ["mend"]
    assert len(tool._lists) == 2
    del here
    gc.collect()
    assert len(tool._lists) == 1


def test_a_grader_follows_the_calls() -> None:
    calls = [
        ToolCall("todo", {"items": [LOOK, MEND]}),
        ToolCall("run", {"command": "ls"}),
        ToolCall("todo", {"items": [{"id": "unknown"}], "merge": True}),
        ToolCall("todo", {"items": "nonsense"}),
        ToolCall("todo", {"items": [{"id": "mend", "status": "completed"}], "merge": True}),
    ]
    expected = [TodoItem("look", "read the code", "pending"), TodoItem("mend", "mend it", "completed")]
    assert Todo().replay(calls) == expected
    tool, here = Todo(), place()
    for made in calls:
        if made.name == "todo":
            call(tool, here, **made.arguments)
    assert tool.final(here) == expected
    assert Todo(name="plan").replay(calls) == []
