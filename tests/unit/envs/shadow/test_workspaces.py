"""Workspaces are apart from each other, have limits, and give way."""

from __future__ import annotations

import pytest

from envs.shadow.workspaces import UnknownWorkspace, Workspaces, WorkspaceTooLarge


def test_workspaces_are_apart_and_change() -> None:
    spaces = Workspaces()
    spaces.index("one", {"a": "needle\n", "b": "hay\n"}, replace=True)
    spaces.index("two", {"c": "needle\n"}, replace=True)
    assert [h.name for h in spaces.search("one", "needle", 5)] == ["a"]
    spaces.index("one", {"b": "needle\n"}, removed=["a", "nowhere"])
    assert [h.name for h in spaces.search("one", "needle", 5)] == ["b"]
    spaces.index("one", {"d": "other\n"}, replace=True)
    assert spaces.search("one", "needle", 5) == []
    assert [h.name for h in spaces.search("two", "needle", 5)] == ["c"]


def test_an_unknown_one_has_to_begin_anew() -> None:
    spaces = Workspaces()
    with pytest.raises(UnknownWorkspace, match="'one': is not known"):
        spaces.index("one", {"a": "x"})
    with pytest.raises(UnknownWorkspace):
        spaces.search("one", "x", 5)


def test_one_that_is_too_large_is_gone() -> None:
    spaces = Workspaces(max_characters=10)
    spaces.index("one", {"a": "12345"}, replace=True)
    spaces.index("one", {"a": "1234567890"})  # in its place: still ten
    with pytest.raises(WorkspaceTooLarge, match="more than 10 characters"):
        spaces.index("one", {"b": "x"})
    assert len(spaces) == 0


def test_those_not_used_for_longest_give_way() -> None:
    spaces = Workspaces(max_workspaces=2)
    for name in ("one", "two"):
        spaces.index(name, {"a": name}, replace=True)
    spaces.search("one", "one", 1)
    spaces.index("three", {"a": "three"}, replace=True)
    with pytest.raises(UnknownWorkspace):
        spaces.search("two", "two", 1)
    assert spaces.search("one", "one", 1) and spaces.search("three", "three", 1)
    # By their size too, but for the newest.
    spaces = Workspaces(max_total=10)
    spaces.index("one", {"a": "123456"}, replace=True)
    spaces.index("two", {"a": "123456789012"}, replace=True)
    assert len(spaces) == 1 and spaces.search("two", "123456789012", 1)
