"""What is read of requests and made of generated text, whichever the API."""

from __future__ import annotations

import pytest

from composer.gateway.exchange import (
    ApiError,
    Said,
    Trouble,
    as_object,
    canonical_arguments,
    read_number,
    read_text,
    read_tool,
    split_calls,
)
from composer.types import ToolCall

LONE = '{"a": "\\ud800"}'
DEEP = '<tool_call>{"name": "ls", "arguments": ' + '{"a": ' * 200 + "1" + "}" * 201 + "</tool_call>"
LS = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "around", "calls"),
    [
        ("no call", "no call", 0),
        (LS, "", 1),
        (f" before {LS} between {LS} after ", "before  between  after", 2),
        ('<tool_call>{"name": "ls"}</tool_call>', '<tool_call>{"name": "ls"}</tool_call>', 0),
        (f"{LS}<tool_call>", f"{LS}<tool_call>", 0),
        ("</tool_call>", "</tool_call>", 0),
        (DEEP, DEEP, 0),
    ],
)
def test_calls_are_taken_out_of_a_text_or_left_in_it(text: str, around: str, calls: int) -> None:
    assert split_calls(text) == (around, [ToolCall("ls", {})] * calls)


@pytest.mark.parametrize(
    ("text", "written"),
    [('{"b": 1, "a": [1.0, "é"]}', '{"a":[1.0,"é"],"b":1}'), ("", "{}"), ("{no json", "{no json"), (LONE, LONE)],
)
def test_arguments_are_written_in_one_way(text: str, written: str) -> None:
    assert canonical_arguments(text) == written


def test_arguments_as_templates_take_them() -> None:
    assert as_object('{"a": 1}') == {"a": 1}
    assert as_object("[1]") == {"arguments": [1]} and as_object("{no") == {"arguments": "{no"}
    assert as_object(LONE) == {"arguments": LONE}, "a lone surrogate is no text"


def test_only_an_assistants_words_are_compared_loosely() -> None:
    assert Said("assistant", " a\n").is_like(Said("assistant", "a"))
    assert not Said("user", " a\n").is_like(Said("user", "a"))
    assert not Said("user", "a").is_like(Said("assistant", "a"))


def test_texts() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert read_text(blocks, "content", ("text",)) == "ab" and read_text(None, "content", ()) == ""
    for wrong in (7, [{"type": "image_url"}], ["a"], [{"type": "text", "text": None}], "\ud800"):
        with pytest.raises(ApiError) as caught:
            read_text(wrong, "messages[0].content", ("text",))
        assert caught.value.trouble is Trouble.BAD_REQUEST and caught.value.param == "messages[0].content"


def test_tools() -> None:
    assert read_tool("ls", None, None, "tools[0]").parameters == {"type": "object", "properties": {}}
    for name, description, parameters in (
        ("", "", {}),
        (None, "", {}),
        ("ls", "", []),
        ("ls", "\ue0000\ue001", {}),
        ("ls", "\ud800", {}),
        ("ls", "", {"properties": []}),
    ):
        with pytest.raises(ApiError, match=r"tools\[0\]"):
            read_tool(name, description, parameters, "tools[0]")


@pytest.mark.parametrize("value", [0, -1, 1.5, "9", True])
def test_numbers(value) -> None:
    assert read_number({"a": None, "b": 7}, "a", "b") == 7 and read_number({}, "a") is None
    with pytest.raises(ApiError, match="a must be an integer of at least 1"):
        read_number({"a": value}, "a")
