"""OpenAI's chat completions: requests, answers, and answers as a stream."""

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
    canonical_arguments,
    check_text,
    read_flag,
    read_list,
    read_number,
    read_text,
    read_tool,
    refuse_unknown,
    refuse_unless,
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "logit_bias": ({},),
    "functions": ([],),
    "modalities": (["text"],),
}
"""What may be asked for when it changes nothing."""
_WITHOUT_EFFECT = (
    "frequency_penalty",
    "metadata",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "reasoning_effort",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "temperature",
    "top_p",
    "user",
    "verbosity",
)
"""How the policy samples is the run's to say: its log-probabilities are trained on."""
_READ = ("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "model")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_CODES = {
    Trouble.BAD_REQUEST: ("invalid_request_error", None),
    Trouble.UNAUTHORIZED: ("invalid_request_error", "invalid_api_key"),
    Trouble.NOT_FOUND: ("invalid_request_error", "not_found"),
    Trouble.CONTEXT_FULL: ("invalid_request_error", "context_length_exceeded"),
    Trouble.MAX_TURNS: ("invalid_request_error", "max_turns_exceeded"),
    Trouble.UNAVAILABLE: ("server_error", "service_unavailable"),
}


def read(body: Mapping[str, Any]) -> Ask:
    """The request that a client has sent.

    Raises:
        ApiError: it asks for what there is not.
    """
    refuse_unknown(body, (*_READ, *_NEUTRAL, *_WITHOUT_EFFECT))
    refuse_unless(body, _NEUTRAL)
    messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(read_list(body, "messages")))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    return Ask(
        messages=messages,
        tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(read_list(body, "tools"))),
        max_tokens=read_number(body, "max_completion_tokens", "max_tokens"),
        stream=read_flag(body, "stream"),
        with_usage=bool(options.get("include_usage")),
        parse_calls=body.get("tool_choice") != "none",
        model=str(body.get("model") or ""),
    )


def _message(message: Mapping[str, Any], param: str) -> Said:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise bad_request(f"{param}.role={message.get('role')!r:.40} is none of {', '.join(_ROLES)}", f"{param}.role")
    text = read_text(message.get("content"), f"{param}.content", ("text", "refusal"))
    calls = read_list(message, "tool_calls") if role == "assistant" else []
    return Said(role, text, tuple(_call(call, f"{param}.tool_calls") for call in calls))


def _call(call: Mapping[str, Any], param: str) -> Call:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{param}: a tool call needs a function with a name", param)
    arguments = check_text(function.get("arguments") or "{}", param)
    return Call(str(call.get("id") or ""), check_text(function["name"], param), canonical_arguments(arguments))


def _tool(tool: Mapping[str, Any], param: str) -> OfferedTool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{param}: only tools of type function are known", param)
    return read_tool(function.get("name"), function.get("description"), function.get("parameters"), param)


def write(answer: Answer, ask: Ask) -> dict[str, Any]:
    """An answer in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.said.text or None, "refusal": None}
    if answer.said.calls:
        message["tool_calls"] = _calls(answer)
    else:
        message["content"] = answer.said.text
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {**_head(answer, ask, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def stream(answer: Answer, ask: Ask) -> Iterator[bytes]:
    """The same answer as server-sent events."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if ask.with_usage else {}
        return _event({**_head(answer, ask, "chat.completion.chunk"), "choices": [choice], **usage})

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    if answer.said.text:
        yield chunk({"content": answer.said.text})
    for index, call in enumerate(_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if ask.with_usage:
        yield _event({**_head(answer, ask, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def write_error(error: ApiError) -> dict[str, Any]:
    """An error in this API's form."""
    kind, code = _CODES[error.trouble]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def _head(answer: Answer, ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": ask.model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.said.calls
    ]


def _usage(answer: Answer) -> dict[str, int]:
    prompt, generated = answer.num_prompt_tokens, answer.num_generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
