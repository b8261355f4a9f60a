"""What an agent asks and is answered, whichever API it speaks: messages, tools, and the errors that it may meet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from composer.errors import ToolCallError
from composer.rollout.chat import CALL_CLOSE, CALL_OPEN, parse_tool_calls
from composer.types import ToolCall

_MAX_DEPTH = 64
_TAG = re.compile(f"({re.escape(CALL_OPEN)}|{re.escape(CALL_CLOSE)})")


@dataclass(frozen=True)
class Call:
    """A tool call as APIs know it."""

    id: str
    """The gateway's own; "" if a client left it out."""
    name: str
    arguments: str
    """JSON, written in one way: keys sorted, no spaces; as it came if it is no JSON."""


@dataclass(frozen=True)
class Said:
    """A message."""

    role: str
    """system, user, assistant or tool."""
    text: str
    calls: tuple[Call, ...] = ()

    def is_like(self, other: Said) -> bool:
        """Whether both are one message: clients strip answers, drop ids, and write JSON in their own way."""
        if self.role != other.role or len(self.calls) != len(other.calls):
            return False
        if self.role != "assistant":
            return self.text == other.text
        if self.text.strip() != other.text.strip():
            return False
        return all(
            (a.name, a.arguments) == (b.name, b.arguments) and (a.id == b.id or not a.id or not b.id)
            for a, b in zip(self.calls, other.calls, strict=True)
        )


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the agent offers the model, with what chat templates ask of one."""

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Ask:
    """A request."""

    messages: tuple[Said, ...]
    tools: tuple[OfferedTool, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    with_usage: bool = True
    """Whether a stream ends with the numbers of tokens."""
    parse_calls: bool = True
    model: str = ""
    num_instructions: int = 0
    """Messages at the start that belong to this request alone, and not to the conversation."""

    @property
    def tools_key(self) -> str:
        """The same text for the same tools."""
        return canonical([[t.name, t.description, t.parameters] for t in self.tools])


@dataclass(frozen=True)
class Answer:
    """What the policy said."""

    id: str
    """Unique in an episode."""
    said: Said
    finish_reason: str
    """stop, tool_calls or length."""
    num_prompt_tokens: int
    num_generated_tokens: int
    created: int
    """Unix seconds."""


class Trouble(StrEnum):
    """Why a request is not answered."""

    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    CONTEXT_FULL = "context_full"
    MAX_TURNS = "max_turns"
    UNAVAILABLE = "unavailable"


STATUS = {
    Trouble.BAD_REQUEST: 400,
    Trouble.UNAUTHORIZED: 401,
    Trouble.NOT_FOUND: 404,
    Trouble.CONTEXT_FULL: 400,
    Trouble.MAX_TURNS: 400,
    Trouble.UNAVAILABLE: 503,
}


class ApiError(Exception):
    """A request that is not answered; the client gets it as an error of its own API."""

    def __init__(self, trouble: Trouble, message: str, param: str | None = None) -> None:
        """`param` is the parameter at fault."""
        super().__init__(message)
        self.trouble, self.message, self.param = trouble, message, param

    @property
    def status(self) -> int:
        """Of the HTTP answer."""
        return STATUS[self.trouble]


def bad_request(message: str, param: str | None = None) -> ApiError:
    """An error of the client's."""
    return ApiError(Trouble.BAD_REQUEST, message, param)


def canonical(value: Any) -> str:
    """JSON written in one way."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def is_deep(value: Any) -> bool:
    """Whether JSON is nested beyond what templates and encoders, which recurse, are asked to take."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _parsed(text: str) -> Any:
    """JSON that can be written again.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    if is_deep(value):
        raise ValueError("too deep")
    canonical(value).encode()  # a lone surrogate may be written in JSON, and is no text
    return value


def canonical_arguments(text: str) -> str:
    """A call's arguments written in one way; as they came if they are no JSON."""
    try:
        return canonical(_parsed(text or "{}"))
    except ValueError:
        return text


def as_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that templates take."""
    try:
        value = _parsed(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def split_calls(text: str) -> tuple[str, list[ToolCall]]:
    r"""The text around the tool calls of a generated turn, and the calls; all of it as text if they are malformed.

    Example:
        >>> split_calls('I look.\n<tool_call>{"name": "ls", "arguments": {}}</tool_call>')
        ('I look.', [ToolCall(name='ls', arguments={})])
        >>> split_calls("<tool_call>ls</tool_call>")
        ('<tool_call>ls</tool_call>', [])
    """
    try:
        calls = parse_tool_calls(text)
    except ToolCallError:
        return text, []
    if any(is_deep(call.arguments) for call in calls):
        return text, []
    return "".join(_TAG.split(text)[0::4]).strip(), calls


def refuse_unknown(body: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse parameters that nothing reads, unless they are null.

    Raises:
        ApiError: there is one.
    """
    for name, value in body.items():
        if name not in known and value is not None:
            raise bad_request(f"Unrecognized request argument supplied: {name}", name)


def refuse_unless(body: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Refuse values other than those under which nothing has to be done.

    Raises:
        ApiError: there is one.
    """
    for name, values in allowed.items():
        if (value := body.get(name)) is not None and value not in values:
            raise bad_request(f"{name}={json.dumps(value)[:80]} is not supported here: leave it out", name)


def read_text(content: Any, param: str, kinds: Sequence[str]) -> str:
    """The text of a content that is a string or a list of blocks.

    Args:
        content: as the client sent it; null is empty.
        param: where it stands, for messages.
        kinds: types of blocks with a `text`.

    Raises:
        ApiError: it holds something else than text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content, param)
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a string or a list of blocks", param)
    return "".join(check_text(read_block(block, param, kinds), param) for block in content)


def read_block(block: Any, param: str, kinds: Sequence[str]) -> Any:
    """The text of one block.

    Raises:
        ApiError: it is none of the `kinds`.
    """
    if not isinstance(block, dict) or block.get("type") not in kinds:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise bad_request(f"{param} holds {kind!r:.40}, and this model reads text only", param)
    return block.get("text", block.get("refusal", ""))


def check_text(text: Any, param: str) -> str:
    """`text`, if it is one that UTF-8 can hold.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(text, str):
        raise bad_request(f"{param} must hold strings", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{param} holds a lone surrogate, which is no text", param) from None
    return text


def read_tool(name: Any, description: Any, parameters: Any, param: str) -> OfferedTool:
    """A tool of the client's.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(name, str) or not name:
        raise bad_request(f"{param}: a tool needs a name", param)
    parameters = parameters if parameters is not None else {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise bad_request(f"{param}: the parameters of {name!r:.40} must be a JSON schema", param)
    described = canonical([name, description, parameters])
    check_text(described, param)
    if "\ue000" in described or "\ue001" in described:
        raise bad_request(f"{param}: {name!r:.40} is described with private-use characters: take them out", param)
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise bad_request(f"{param}: the properties of {name!r:.40} must be an object", param)
    return OfferedTool(name, check_text(description or "", param), parameters)


def read_number(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these parameters that is there, as a number of at least 1.

    Raises:
        ApiError: it is none.
    """
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise bad_request(f"{name} must be an integer of at least 1", name)
            return value
    return None


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A parameter that is true or false; null is false.

    Raises:
        ApiError: it is neither.
    """
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise bad_request(f"{name} must be true or false", name)
    return bool(value)


def read_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """A parameter that is a list; null is empty.

    Raises:
        ApiError: it is none.
    """
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} must be a list of objects", name)
    return value
