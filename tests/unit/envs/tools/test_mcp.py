"""What of MCP needs no server: the config of a tool, and results as the model sees them."""

from __future__ import annotations

from typing import Any

import pytest

from envs.tools.mcp import McpTool, _result
from envs.tools.rpc import PeerError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("answer", "content", "ok"),
    [
        ({"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, "one\ntwo", True),
        ({"content": [{"type": "text", "text": "no such issue"}], "isError": True}, "no such issue", False),
        ({"content": [], "structuredContent": {"a": "é"}}, '{"a": "é"}', True),
        ({"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}, "[image image/png]", True),
        ({"content": [{"type": "resource_link", "uri": "file:///a"}]}, "[resource_link file:///a]", True),
        ({"content": [{"type": "resource", "resource": {"uri": "u", "text": "inside"}}]}, "inside", True),
        ({"content": [{"type": "resource", "resource": {"uri": "u", "blob": "AA"}}]}, "[resource u]", True),
        ({"content": [7, {"type": 3}]}, "[3]", True),
        ({}, "", True),
    ],
)
def test_a_result_as_the_model_sees_it(answer: Any, content: str, ok: bool) -> None:
    result = _result(answer)
    assert (result.content, result.ok, result.ends_episode) == (content, ok, False)


@pytest.mark.parametrize("answer", [None, "text", [], {"content": "text"}])
def test_what_is_no_result(answer: Any) -> None:
    with pytest.raises(PeerError, match="no result of a tool"):
        _result(answer)


def test_tools_with_the_same_command_share_a_server() -> None:
    def make(**more: Any) -> McpTool:
        return McpTool(**({"command": ["server", "--x"], "tool": "t", "description": "d", "parameters": SCHEMA} | more))

    one = make()
    assert make(tool="u").server is one.server
    assert make(command=["server"]).server is not one.server
    assert make(env={"A": "1"}).server is not one.server
    assert make(timeout_s=1.0).server is not one.server
    assert (one.name, make(name="other").name, make(name="other").tool) == ("t", "other", "t")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"command": []}, "`command` must be a program"),
        ({"command": ["a\0"]}, "`command` must be a program"),
        ({"tool": "a/b"}, "`name` must be letters"),
        ({"parameters": {"type": "text"}}, "`parameters` must be a JSON schema"),
        ({"parameters": {"type": "string"}}, "`parameters` must be a schema of type object"),
        ({"timeout_s": 0}, "`timeout_s` must be above 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        McpTool(**({"command": ["s"], "tool": "t", "description": "d", "parameters": SCHEMA} | more))
