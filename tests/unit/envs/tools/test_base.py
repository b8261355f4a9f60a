"""How an env differs from the product: names, descriptions, and tools that are lenient."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from composer.contract import Sandbox, Tool, ToolResult
from envs.tools.base import CheckedTool, integer, parameters, require_positive, text, with_optional
from envs.tools.edit import SearchReplace
from envs.tools.files import EditLine, ReadFile, WriteFile
from envs.tools.finish import Finish
from envs.tools.grep import Grep
from envs.tools.listing import Glob, ListDir, ListFiles
from envs.tools.search import SemanticSearch
from envs.tools.shell import Run
from envs.tools.todo import Todo

TOOLS = (
    ReadFile,
    WriteFile,
    EditLine,
    ListFiles,
    ListDir,
    Glob,
    Grep,
    SearchReplace,
    Run,
    Todo,
    Finish,
    SemanticSearch,
)
NO_SANDBOX = cast("Sandbox", object())


class Echo(CheckedTool):
    """Shows the arguments that it got."""

    name = "echo"
    description = "Show the arguments."
    parameters = with_optional(parameters(word=text("a word")), times=integer("how often"))

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        return ToolResult(repr(dict(arguments)))


def call(tool: CheckedTool, arguments: dict[str, Any]) -> ToolResult:
    return asyncio.run(tool.call(arguments, NO_SANDBOX))


def test_a_strict_tool_refuses_what_it_does_not_know_and_a_lenient_one_ignores_it() -> None:
    given = {"word": "a", "color": "red"}
    unexpected = "error: Additional properties are not allowed ('color' was unexpected)"
    assert call(Echo(), given) == ToolResult(unexpected, ok=False)
    assert call(Echo(strict=False), given) == ToolResult("{'word': 'a'}")
    # What it does know has to be right all the same.
    assert call(Echo(strict=False), {"word": 1}).content == "error: word: 1 is not of type 'string'"
    assert call(Echo(strict=False), {"color": 1}).content == "error: 'word' is a required property"
    assert call(Echo(), {"word": "a", "times": 0}).content == "error: times: 0 is less than the minimum of 1"
    assert call(Echo(), {"word": "a", "times": 2}).content == "{'word': 'a', 'times': 2}"


@pytest.mark.parametrize("make", TOOLS)
def test_every_tool_takes_another_name_and_description(make: type[CheckedTool]) -> None:
    own, other = make(), make(name="other-name", description="Another.", strict=False)
    assert isinstance(own, Tool) and isinstance(other, Tool)
    assert own.name and own.description and own.strict
    assert (other.name, other.description, other.strict) == ("other-name", "Another.", False)
    assert (make().name, make().description) == (own.name, own.description), "one tool's name is not another's"
    required = own.parameters["required"]
    assert list(own.parameters["properties"])[: len(required)] == required, "templates show arguments in this order"
    for name in ("1st", "a b", "a" * 65, "é"):
        with pytest.raises(ValueError, match="`name` must be letters"):
            make(name=name)


def test_what_the_smallest_env_shows_its_model_is_as_it_was() -> None:
    path = {
        "type": "string",
        "minLength": 1,
        "pattern": "^[^\\u0000]*$",
        "description": "path relative to the repository",
    }
    assert [(t.name, t.description) for t in (ReadFile(), EditLine(), Finish())] == [
        ("read_file", "Show a text file."),
        ("edit_line", "Replace one line of a text file. Lines count from 1."),
        ("finish", "Hand in the work."),
    ]
    assert ReadFile().parameters == {
        "type": "object",
        "properties": {"path": path},
        "required": ["path"],
        "additionalProperties": False,
    }
    assert list(EditLine().parameters["properties"]) == EditLine().parameters["required"] == ["path", "line", "text"]
    assert Finish().parameters["properties"] == {}


def test_numbers_of_constructors_are_checked() -> None:
    with pytest.raises(ValueError, match="`timeout_s` must be above 0, but is 0 instead"):
        require_positive(max_files=1, timeout_s=0)
    with pytest.raises(ValueError, match="`most` must be above 0, but is nan instead"):
        require_positive(most=float("nan"))
    for make in (lambda: Run(timeout_s=0), lambda: Grep(max_results=0), lambda: Todo(max_items=0)):
        with pytest.raises(ValueError, match="must be above 0"):
            make()
