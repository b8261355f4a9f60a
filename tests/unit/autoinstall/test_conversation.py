"""The conversation of an agent: what is played, what the model sees of its mistakes, and how it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from composer.autoinstall.client import Endpoint
from composer.autoinstall.conversation import Conversation
from composer.contract import Sandbox, ToolResult
from composer.errors import GeneratorError, ToolError
from composer.schema import InstallAgentConfig
from tests.integration.autoinstall.scripted_endpoint import ScriptedEndpoint, Trouble

SANDBOX = cast("Sandbox", object())
"""These tools look at none."""


class Add:
    name, description = "add", "Add numbers."
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

    async def call(self, arguments, sandbox):
        return ToolResult(str(arguments["a"] + arguments["b"]))


class Done:
    name, description, parameters = "done", "End.", {"type": "object"}

    async def call(self, arguments, sandbox):
        return ToolResult("ended", ends_episode=True)


def converse(turns, **config) -> tuple[str | Exception, Conversation, list[Any], ScriptedEndpoint]:
    server = ScriptedEndpoint({"proposer": turns})
    played: list[Any] = []
    with server.serving():
        agent = InstallAgentConfig(url=server.url("proposer"), **{"max_turns": 10, **config})

        async def run():
            endpoint = Endpoint(agent, "autoinstall.proposer", 2.0, 1.0)
            talk = Conversation(
                endpoint,
                {tool.name: tool for tool in (Add(), Done())},
                SANDBOX,
                lambda text: None,
                lambda call, result: played.append((call.name, result.content)),
            )
            talk.open("Be good.", "Add.")
            try:
                return await talk.run(), talk
            except Exception as error:
                return error, talk
            finally:
                await endpoint.close()

        ended, talk = asyncio.run(run())
    return ended, talk, played, server


def test_calls_are_played_in_order_until_the_last():
    calls = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}), ("done", {}), ("add", {"a": 5, "b": 6})]
    ended, talk, played, _ = converse([calls[:1], calls[1:]])
    assert ended == ""
    assert played == [("add", "3"), ("add", "7"), ("done", "ended")]
    assert [m["content"] for m in talk.messages if m["role"] == "tool"] == [
        "3", "7", "ended", "not done: the work was handed in before",
    ]  # fmt: skip
    assert (talk.num_turns, talk.num_tokens) == (2, 220)


def test_mistakes_of_the_model_are_answered():
    raw = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
    raw["message"]["tool_calls"] = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{'a': 1"}},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": "[1]"}},
        {"id": "4", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}},
        {"id": "3", "type": "function", "function": {"name": "fly", "arguments": "{}"}},
    ]
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [raw]}
    ended, talk, played, _ = converse([Trouble(200, json.dumps(body)), "I am done", [("done", {})]])
    assert ended == "" and played == [("done", "ended")]
    no_json, no_object, no_text, no_tool = [m["content"] for m in talk.messages if m["role"] == "tool"][:4]
    assert "surrogates not allowed" in no_text
    assert no_json.startswith("error: the arguments are no JSON (") and no_object.endswith("no JSON object")
    assert no_tool == "error: no tool 'fly': the tools are add, done"
    assert "`done` is how you hand in" in talk.messages[-3]["content"]


def test_tool_calls_in_text_for_endpoints_that_read_none():
    turns = [
        'Let me.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": "done", "arguments": {}}</tool_call>',
    ]
    ended, talk, played, server = converse(turns, native_tools=False)
    assert ended == "" and played == [("add", "3"), ("done", "ended")]
    assert '"name": "add"' in talk.messages[0]["content"]
    assert [m["content"] for m in talk.messages if m["role"] == "user"][1] == "<tool_response>\n3\n</tool_response>"
    assert all("tools" not in request for request in server.requests["proposer"])


@pytest.mark.parametrize(
    ("turns", "config", "said"),
    [
        ([[("add", {"a": 1, "b": 1})]], {}, "its 10 turns were over"),
        ([[("add", {"a": 1, "b": 1})]], {"max_total_tokens": 300}, "its 300 tokens were used up"),
        (["hm"], {}, "it called no tool in 4 turns one after another"),
        ([Trouble(400, '{"error": {"message": "maximum context length"}}')], {}, "did not fit the model any more"),
    ],
)
def test_what_an_agent_runs_out_of(turns, config, said):
    ended, *_ = converse(turns, **config)
    assert said in ended


def test_failures_on_our_side_come_out_and_are_never_shown():
    ended, talk, *_ = converse([[("add", {"a": 1})]])  # this tool breaks its contract on wrong arguments
    assert isinstance(ended, ToolError) and "tool 'add' failed" in str(ended)
    assert not any(m["role"] == "tool" for m in talk.messages)
    ended, *_ = converse([Trouble(500, "boom")])
    assert isinstance(ended, GeneratorError)
