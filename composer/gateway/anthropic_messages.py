"""Anthropic's messages: requests, answers, and answers as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from composer.gateway.exchange import (
    Answer,
    ApiError,
    Ask,
    Call,
    OfferedTool,
    Said,
    Trouble,
    bad_request,
    canonical,
    check_text,
    read_block,
    read_flag,
    read_list,
    read_number,
    read_text,
    read_tool,
    refuse_unknown,
    refuse_unless,
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {"stop_sequences": ([],), "mcp_servers": ([],), "container": ()}
_WITHOUT_EFFECT = (
    "cache_control",
    "context_management",
    "inference_geo",
    "metadata",
    "output_config",
    "service_tier",
    "temperature",
    "thinking",
    "top_k",
    "top_p",
)
_READ = ("messages", "system", "tools", "tool_choice", "max_tokens", "stream", "model")
_KINDS = {
    Trouble.BAD_REQUEST: "invalid_request_error",
    Trouble.UNAUTHORIZED: "authentication_error",
    Trouble.NOT_FOUND: "not_found_error",
    Trouble.CONTEXT_FULL: "invalid_request_error",
    Trouble.MAX_TURNS: "invalid_request_error",
    Trouble.UNAVAILABLE: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def read(body: Mapping[str, Any]) -> Ask:
    """The request that a client has sent.

    Raises:
        ApiError: it asks for what there is not.
    """
    refuse_unknown(body, (*_READ, *_NEUTRAL, *_WITHOUT_EFFECT))
    refuse_unless(body, _NEUTRAL)
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise bad_request("tool_choice: only auto and none are supported here", "tool_choice")
    system = read_text(body.get("system"), "system", ("text",))
    messages = [Said("system", system)] if system else []
    for i, message in enumerate(read_list(body, "messages")):
        messages += _messages(message, f"messages.{i}")
    return Ask(
        messages=tuple(messages),
        tools=tuple(_tool(t, f"tools.{i}") for i, t in enumerate(read_list(body, "tools"))),
        max_tokens=read_number(body, "max_tokens"),
        stream=read_flag(body, "stream"),
        parse_calls=choice["type"] == "auto",
        model=str(body.get("model") or ""),
    )


def _messages(message: Mapping[str, Any], param: str) -> list[Said]:
    """One message of the API: an assistant's, or tool results and what the user says."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else read_list(message, "content")
    if role == "system":
        return [Said("system", read_text(content, param, ("text",)))]
    if role == "assistant":
        calls = tuple(_call(block, param) for block in blocks if block.get("type") == "tool_use")
        texts = [block for block in blocks if block.get("type") != "tool_use"]
        return [Said("assistant", read_text(texts, param, ("text",)), calls)]
    if role != "user":
        raise bad_request(f"{param}.role={role!r:.40} is neither user nor assistant", f"{param}.role")
    said: list[Said] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            said.append(Said("tool", read_text(block.get("content"), param, ("text",))))
        else:
            text = check_text(read_block(block, param, ("text",)), param)
            if said and said[-1].role == "user":
                said[-1] = Said("user", said[-1].text + text)
            else:
                said.append(Said("user", text))
    return said


def _call(block: Mapping[str, Any], param: str) -> Call:
    if not isinstance(block.get("input"), dict):
        raise bad_request(f"{param}: the input of a tool_use must be an object", param)
    arguments = check_text(canonical(block["input"]), param)
    return Call(str(block.get("id") or ""), check_text(block.get("name"), param), arguments)


def _tool(tool: Mapping[str, Any], param: str) -> OfferedTool:
    if tool.get("type", "custom") not in ("custom", None):
        raise bad_request(f"{param}: only tools of the client's own (type custom) are known", param)
    return read_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), param)


def write(answer: Answer, ask: Ask) -> dict[str, Any]:
    """An answer in one piece."""
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_generated_tokens}
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": _content(answer),
        "stop_reason": _STOPS[answer.finish_reason],
        "stop_sequence": None,
        "usage": usage,
    }


def stream(answer: Answer, ask: Ask) -> Iterator[bytes]:
    """The same answer as server-sent events."""
    whole = write(answer, ask)
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": 0}
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            opened: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            opened = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": canonical(block["input"])}
        yield _event("content_block_start", index=index, content_block=opened)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ending, usage=whole["usage"])
    yield _event("message_stop")


def write_error(error: ApiError) -> dict[str, Any]:
    """An error in this API's form."""
    message = f"{error.param}: {error.message}" if error.param and error.param not in error.message else error.message
    return {"type": "error", "error": {"type": _KINDS[error.trouble], "message": message}, "request_id": None}


def _content(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.said.text}] if answer.said.text else []
    for call in answer.said.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
