"""OpenAI's responses: requests, answers, and answers as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from composer.gateway.exchange import (
    Answer,
    Ask,
    Call,
    OfferedTool,
    Said,
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
from composer.gateway.openai_chat import write_error

__all__ = ["read", "stream", "write", "write_error"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
}
_WITHOUT_EFFECT = (
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "temperature",
    "text",
    "top_p",
    "user",
)
_READ = ("input", "instructions", "tools", "max_output_tokens", "stream", "model", "previous_response_id")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")


def read(body: Mapping[str, Any], earlier: tuple[Said, ...] = ()) -> Ask:
    """The request that a client has sent.

    Args:
        body: the request.
        earlier: the conversation up to `previous_response_id`, without its instructions.

    Raises:
        ApiError: it asks for what there is not.
    """
    refuse_unknown(body, (*_READ, *_NEUTRAL, *_WITHOUT_EFFECT))
    include = [i for i in body.get("include") or [] if i != "reasoning.encrypted_content"]  # there is none
    refuse_unless({**body, "include": include}, _NEUTRAL)
    form = body["text"].get("format") if isinstance(body.get("text"), dict) else None
    refuse_unless({"text.format": form}, {"text.format": ({"type": "text"},)})
    instructions = check_text(body.get("instructions") or "", "instructions")
    system = (Said("system", instructions),) if instructions else ()
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else read_list(body, "input")
    return Ask(
        messages=(*system, *earlier, *_messages(items)),
        tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(read_list(body, "tools"))),
        max_tokens=read_number(body, "max_output_tokens"),
        stream=read_flag(body, "stream"),
        parse_calls=body.get("tool_choice") != "none",
        model=str(body.get("model") or ""),
        num_instructions=len(system),
    )


def _messages(items: list[Any]) -> Iterator[Said]:
    """Messages from items: an assistant's text and the calls after it are one message."""
    text: str | None = None
    calls: list[Call] = []
    for i, item in enumerate(items):
        param, kind = f"input[{i}]", item.get("type", "message")
        if kind == "function_call":
            arguments = check_text(item.get("arguments") or "{}", param)
            name = check_text(item.get("name"), param)
            calls.append(Call(str(item.get("call_id") or ""), name, canonical_arguments(arguments)))
            continue
        said = _message(item, kind, param)
        if said.role == "assistant" and text is None and not calls:
            text = said.text
            continue
        if text is not None or calls:
            yield Said("assistant", text or "", tuple(calls))
            text, calls = None, []
        if said.role == "assistant":
            text = said.text
        else:
            yield said
    if text is not None or calls:
        yield Said("assistant", text or "", tuple(calls))


def _message(item: Mapping[str, Any], kind: str, param: str) -> Said:
    if kind == "function_call_output":
        return Said("tool", read_text(item.get("output"), f"{param}.output", _TEXTS))
    role = _ROLES.get(str(item.get("role")))
    if kind != "message" or role is None:
        what = f"type={kind!r:.40}" if kind != "message" else f"role={item.get('role')!r:.40}"
        raise bad_request(f"{param}: {what} is not supported here", param)
    return Said(role, read_text(item.get("content"), f"{param}.content", _TEXTS))


def _tool(tool: Mapping[str, Any], param: str) -> OfferedTool:
    if tool.get("type") != "function":
        raise bad_request(f"{param}: only tools of type function are known", param)
    return read_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), param)


def write(answer: Answer, ask: Ask) -> dict[str, Any]:
    """An answer in one piece."""
    return _response(answer, ask, _output(answer), ended=True)


def stream(answer: Answer, ask: Ask) -> Iterator[bytes]:
    """The same answer as server-sent events."""
    number = 0

    def event(kind: str, **data: Any) -> bytes:
        nonlocal number
        body = {"type": kind, "sequence_number": number, **data}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()

    begun = _response(answer, ask, [], ended=False)
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_output(answer)):
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "status": "in_progress"}
        if item["type"] == "message":
            [part] = item["content"]
            yield event("response.output_item.added", output_index=index, item={**opened, "content": []})
            place["content_index"] = 0
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            if part["text"]:
                yield event("response.output_text.delta", **place, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        else:
            yield event("response.output_item.added", output_index=index, item={**opened, "arguments": ""})
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **place, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    whole = write(answer, ask)
    yield event(f"response.{whole['status']}", response=whole)


def _output(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer: its text, if it has any or nothing else, and its calls."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.said.text or not answer.said.calls:
        part = {"type": "output_text", "text": answer.said.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
        items.append({**message, "status": status})
    for number, call in enumerate(answer.said.calls):
        item = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "call_id": call.id}
        items.append({**item, "name": call.name, "arguments": call.arguments, "status": status})
    return items


def _response(answer: Answer, ask: Ask, output: list[dict[str, Any]], ended: bool) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    prompt, generated = answer.num_prompt_tokens, answer.num_generated_tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": ("incomplete" if cut else "completed") if ended else "in_progress",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut and ended else None,
        "instructions": None,
        "metadata": {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage if ended else None,
    }
