"""Tool `todo`: the agent's list of what there is to do, by episode.

The list is kept here and not in the sandbox: nothing that the agent runs can change it. Whoever has the sandbox reads
how it ended by `final`. A grader, who has not, follows the calls in the trajectory by `replay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer.contract import Sandbox, ToolResult
from composer.types import ToolCall
from envs.tools.base import CheckedTool, boolean, parameters, refuse, require_positive, text, with_optional
from envs.tools.episode import EpisodeState

_MARKS = {"pending": "[ ]", "in_progress": "[>]", "completed": "[x]", "cancelled": "[-]"}
STATUSES = tuple(_MARKS)


@dataclass(frozen=True)
class TodoItem:
    """One thing to do."""

    id: str
    content: str
    status: str
    """One of `STATUSES`."""


def _parameters(strict: bool) -> dict[str, Any]:
    item = {
        "type": "object",
        "properties": {
            "id": text("short name of the item", max_length=64),
            "content": text("what to do", max_length=500),
            "status": {"type": "string", "enum": list(STATUSES), "description": "by default pending"},
        },
        "required": ["id"],
    }
    items = {
        "type": "array",
        "items": item | ({"additionalProperties": False} if strict else {}),
        "description": "what there is to do",
    }
    merge = boolean("change the list by these items, instead of replacing it")
    return with_optional(parameters(items=items), merge=merge)


class Todo(CheckedTool):
    """Replaces the list, or with `merge` changes the named items and adds new ones; answers with the whole list.

    A strict one refuses an item without a text, with something unknown in it, or with the id of another; a lenient one
    takes the id for a missing text, ignores what it does not know, and keeps the last of two.
    """

    name = "todo"
    description = "Write down what there is to do, or change its status. Answers with the whole list."
    parameters = _parameters(strict=True)

    def __init__(self, max_items: int = 50, *, name: str = "", description: str = "", strict: bool = True) -> None:
        """Choose how long a list may be.

        Raises:
            ValueError: it is not above 0, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_items=max_items)
        self.parameters = _parameters(strict)
        self.max_items = max_items
        self._lists: EpisodeState[dict[str, TodoItem]] = EpisodeState(dict)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the list as it is now."""
        items = self._lists.of(sandbox)
        changed = self._changed(items, arguments)
        if isinstance(changed, str):
            return refuse(changed)
        items.clear()
        items.update(changed)
        return ToolResult("\n".join(map(_line, items.values())) or "(nothing to do)")

    def final(self, sandbox: Sandbox) -> list[TodoItem]:
        """The list of the episode that happens in `sandbox`."""
        return list(self._lists.of(sandbox).values())

    def restore(self, sandbox: Sandbox, items: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the list that `final` gave in an earlier sandbox of the same episode."""
        self._lists.of(sandbox).update({item["id"]: TodoItem(**item) for item in items})

    def replay(self, calls: Iterable[ToolCall]) -> list[TodoItem]:
        """The list after the calls of an episode, in order; those of other tools and those that were refused are none.

        Example:
            >>> calls = [ToolCall("todo", {"items": [{"id": "a", "content": "look"}]})]
            >>> Todo().replay(calls)
            [TodoItem(id='a', content='look', status='pending')]
        """
        items: dict[str, TodoItem] = {}
        for call in calls:
            if call.name != self.name or self.fault(call.arguments):
                continue
            changed = self._changed(items, self.known(call.arguments))
            items = items if isinstance(changed, str) else changed
        return list(items.values())

    def _changed(self, items: Mapping[str, TodoItem], arguments: Mapping[str, Any]) -> dict[str, TodoItem] | str:
        """The list after a call, or why there is none."""
        old = items if arguments.get("merge", False) else {}
        new: dict[str, TodoItem] = {}
        for given in arguments["items"]:
            id = given["id"]
            if self.strict and id in new:
                return f"item {id!r} is given twice"
            before = old.get(id)
            content = given.get("content", before.content if before else "" if self.strict else id)
            if not content:
                return f"item {id!r} is new and needs a content"
            new[id] = TodoItem(id, content, given.get("status", before.status if before else "pending"))
        changed = {**old, **new}
        if len(changed) > self.max_items:
            return f"the list would have {len(changed)} items, and may have {self.max_items}"
        return changed


def _line(item: TodoItem) -> str:
    return f"{_MARKS[item.status]} {item.id}: {item.content}"
