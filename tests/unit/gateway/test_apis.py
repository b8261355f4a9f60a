"""The three APIs by hand: what each request means, and each answer, stream and error as their documentation has it."""

from __future__ import annotations

import json

import pytest

from composer.gateway import anthropic_messages, openai_chat, openai_responses
from composer.gateway.exchange import Answer, ApiError, Ask, Call, OfferedTool, Said, Trouble

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = OfferedTool("f", "Does f.", SCHEMA)
CALL = Call("call_7_0", "f", '{"a":1}')
ASK = Ask((Said("user", "u"),), (TOOL,), model="m")
SPOKEN = Answer("7", Said("assistant", "hello"), "stop", 5, 2, 1000)
CALLED = Answer("7", Said("assistant", "look", (CALL,)), "tool_calls", 5, 2, 1000)
CUT = Answer("7", Said("assistant", "hel"), "length", 5, 1, 1000)


def test_a_chat_request() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": SCHEMA}}],
        "max_tokens": 9,
        "temperature": 0.0,
        "n": 1,
        "logprobs": False,
        "stop": None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    call = Call("x", "f", '{"a":1}')
    messages = (Said("system", "s"), Said("user", "u"), Said("assistant", "", (call,)), Said("tool", "t"))
    assert openai_chat.read(body) == Ask(messages, (TOOL,), 9, stream=True, with_usage=True, model="m")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": ["\n"]}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_chat_request_for_what_there_is_not(body: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        openai_chat.read(body)
    error = openai_chat.write_error(caught.value)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert caught.value.status == 400


def test_chat_answers() -> None:
    written = openai_chat.write(CALLED, ASK)
    assert (written["id"], written["object"], written["created"], written["model"]) == (
        "chatcmpl-7",
        "chat.completion",
        1000,
        "m",
    )
    [choice] = written["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "look"
    assert choice["message"]["tool_calls"] == [
        {"id": "call_7_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    assert written["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert openai_chat.write(CUT, ASK)["choices"][0]["finish_reason"] == "length"


def events(stream) -> list[dict]:
    """The data of server-sent events; each event's name, if it has one, is the data's type."""
    found = []
    for event in b"".join(stream).decode().removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        if data == "data: [DONE]":
            continue
        found.append(json.loads(data.removeprefix("data: ")))
        assert not name or name == [f"event: {found[-1]['type']}"]
    return found


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_chat_stream(with_usage: bool) -> None:
    ask = Ask(ASK.messages, ASK.tools, with_usage=with_usage, model="m")
    assert b"".join(openai_chat.stream(CALLED, ask)).endswith(b"data: [DONE]\n\n")
    *chunks, last = events(openai_chat.stream(CALLED, ask))
    if not with_usage:
        chunks.append(last)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "look"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_7_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            ]
        },
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "tool_calls"]
    if with_usage:
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


def test_a_responses_request() -> None:
    body = {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": "u"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}], "id": "1"},
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": '{"a": 1}', "id": "2"},
            {"type": "function_call", "call_id": "y", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": "t"},
            {"type": "function_call_output", "call_id": "y", "output": [{"type": "input_text", "text": "v"}]},
            {"type": "function_call", "call_id": "z", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "z", "output": ""},
        ],
        "tools": [{"type": "function", "name": "f", "description": "Does f.", "parameters": SCHEMA, "strict": True}],
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
    }
    x, y, z = Call("x", "f", '{"a":1}'), Call("y", "f", "{}"), Call("z", "f", "{}")
    messages = (
        Said("system", "s"),
        Said("user", "u"),
        Said("assistant", "look", (x, y)),
        Said("tool", "t"),
        Said("tool", "v"),
        Said("assistant", "", (z,)),
        Said("tool", ""),
    )
    assert openai_responses.read(body) == Ask(messages, (TOOL,), 9, model="m", num_instructions=1)
    earlier = (Said("user", "before"), Said("assistant", "yes"))
    ask = openai_responses.read({"input": "u", "instructions": "s"}, earlier)
    assert ask.messages == (Said("system", "s"), *earlier, Said("user", "u"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 1}, "n"),
    ],
)
def test_a_responses_request_for_what_there_is_not(body: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        openai_responses.read(body)
    assert caught.value.param == param


def test_responses_answers() -> None:
    written = openai_responses.write(CALLED, ASK)
    message, call = written["output"]
    assert message["content"] == [{"type": "output_text", "text": "look", "annotations": [], "logprobs": []}]
    assert (call["type"], call["call_id"], call["arguments"]) == ("function_call", "call_7_0", '{"a":1}')
    assert written["status"] == "completed" and written["usage"]["total_tokens"] == 7
    cut = openai_responses.write(CUT, ASK)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    silent = Answer("7", Said("assistant", ""), "stop", 5, 1, 1000)
    assert [item["type"] for item in openai_responses.write(silent, ASK)["output"]] == ["message"]


def test_a_responses_stream() -> None:
    found = events(openai_responses.stream(CALLED, ASK))
    assert [e["type"].removeprefix("response.") for e in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    assert found[0]["response"]["status"] == "in_progress"
    assert found[-1]["response"] == openai_responses.write(CALLED, ASK)
    assert events(openai_responses.stream(CUT, ASK))[-1]["type"] == "response.incomplete"


def test_a_messages_request() -> None:
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "t"}]},
                    {"type": "text", "text": "and "},
                    {"type": "text", "text": "more"},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "Does f.", "input_schema": SCHEMA, "type": "custom"}],
        "thinking": {"type": "adaptive"},
    }
    call = Call("x", "f", '{"a":1}')
    messages = (
        Said("system", "s"),
        Said("user", "u"),
        Said("assistant", "look", (call,)),
        Said("tool", "t"),
        Said("user", "and more"),
    )
    assert anthropic_messages.read(body) == Ask(messages, (TOOL,), 9, model="m")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["a"]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages.0.role"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_a_messages_request_for_what_there_is_not(body: dict, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        anthropic_messages.read(body)
    error = anthropic_messages.write_error(caught.value)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_messages_answers() -> None:
    written = anthropic_messages.write(CALLED, ASK)
    assert written["content"] == [
        {"type": "text", "text": "look"},
        {"type": "tool_use", "id": "call_7_0", "name": "f", "input": {"a": 1}},
    ]
    assert written["stop_reason"] == "tool_use" and written["usage"] == {"input_tokens": 5, "output_tokens": 2}
    assert anthropic_messages.write(CUT, ASK)["stop_reason"] == "max_tokens"
    assert anthropic_messages.write(SPOKEN, ASK)["stop_reason"] == "end_turn"


def test_a_messages_stream() -> None:
    found = events(anthropic_messages.stream(CALLED, ASK))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [e["type"] for e in found] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert found[0]["message"]["content"] == [] and found[2]["delta"] == {"type": "text_delta", "text": "look"}
    assert found[4]["content_block"] == {"type": "tool_use", "id": "call_7_0", "name": "f", "input": {}}
    assert found[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert found[7]["delta"]["stop_reason"] == "tool_use" and found[7]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("trouble", "openai", "anthropic", "status"),
    [
        (Trouble.UNAUTHORIZED, "invalid_api_key", "authentication_error", 401),
        (Trouble.NOT_FOUND, "not_found", "not_found_error", 404),
        (Trouble.CONTEXT_FULL, "context_length_exceeded", "invalid_request_error", 400),
        (Trouble.MAX_TURNS, "max_turns_exceeded", "invalid_request_error", 400),
        (Trouble.UNAVAILABLE, "service_unavailable", "overloaded_error", 503),
    ],
)
def test_errors(trouble: Trouble, openai: str, anthropic: str, status: int) -> None:
    error = ApiError(trouble, "why")
    assert error.status == status
    assert openai_chat.write_error(error)["error"]["code"] == openai
    assert openai_responses.write_error(error) == openai_chat.write_error(error)
    expected = {"type": "error", "error": {"type": anthropic, "message": "why"}, "request_id": None}
    assert anthropic_messages.write_error(error) == expected
