"""Chat format: templates, tool calls, and messages as token ids.

A text is encoded once, when it enters the conversation; generated ids are kept as they were sampled. Text that came
from outside (a request, a file) is encoded without the tokenizer's control tokens, so a file that holds `<|im_end|>`
cannot end a turn.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.contract import Tool
from composer.errors import TokenizerError, ToolCallError
from composer.types import Message, ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    CALL_OPEN,
    CALL_CLOSE,
    "<tool_response>",
    "</tool_response>",
)
"""What a tokenizer for these templates holds as single tokens; `<|im_end|>` ends a turn."""

# Both templates differ only in how they introduce the tools and in the line breaks around a call.
_MESSAGES = """\
{%- for message in messages[first:] %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- CALL_OPEN + '{"name": ' + (call.name | tojson) + ', "arguments": ' }}
{{- (call.arguments if call.arguments is string else (call.arguments | tojson)) + '}' + CALL_CLOSE }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_SYSTEM = """\
{%- set first = 1 if messages and messages[0].role == 'system' else 0 %}
{%- set system = messages[0].content if first else '' %}"""

TEMPLATES = {
    "compact": _SYSTEM
    + """
{%- if tools %}
{%- set list = namespace(signatures='') %}
{%- for tool in tools %}
{%- set tool = tool.function or tool %}
{%- set signature = tool.name + '(' + (tool.parameters.properties or {}) | join(', ') + ')' %}
{%- set list.signatures = list.signatures + (', ' if list.signatures else '') + signature %}
{%- endfor %}
{%- set system = (system + ' ' if system else '') + 'Tools: ' + list.signatures + '.' %}
{%- endif %}
{%- if system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}"""
    + _MESSAGES.replace("CALL_OPEN", "'<tool_call>'").replace("CALL_CLOSE", "'</tool_call>'"),
    "hermes": _SYSTEM
    + """
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') }}
{{- '# Tools\\n\\nYou may call one or more tools. Their signatures, one a line:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each call, answer with a JSON object between tags:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}"""
    + _MESSAGES.replace("CALL_OPEN", "'<tool_call>\\n'").replace("CALL_CLOSE", "'\\n</tool_call>'"),
}
"""Chat templates by name: `compact` names each tool's arguments only, since every token costs a small model; `hermes`
shows the whole JSON schemas as Hermes and Qwen models know them."""


# Private-use characters around a number stand for a message's content while a template is rendered.
_MARK = "\ue000([0-9]+)\ue001"


_MAX_RENDERED = 256
"""Shapes of conversations whose rendering is kept."""
_CALL_TAGS = re.compile(f"({re.escape(CALL_OPEN)}|{re.escape(CALL_CLOSE)})")


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"


def install_template(tokenizer_dir: Path, name: str) -> None:
    """Write a template of `TEMPLATES` as `chat_template.jinja` beside a Hugging Face tokenizer.

    Raises:
        TokenizerError: there is no such template.
    """
    if name not in TEMPLATES:
        raise TokenizerError(f"There is no chat template {name!r}: choose one of {', '.join(TEMPLATES)}.")
    (tokenizer_dir / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")


def describe_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools in the form that chat templates and OpenAI-style APIs take."""
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]


def render(
    template: str,
    messages: Sequence[Message],
    tools: Iterable[Tool],
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as text, exactly as transformers' `apply_chat_template` and vLLM render it.

    Raises:
        TokenizerError: the template refuses the conversation.
    """
    # Here and not above: transformers takes a second to import, and plans read this module's names only.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    described: list[Any] = [*describe_tools(tools)]
    conversation: list[dict[str, Any]] = []
    for m in messages:
        conversation.append({"role": m.role, "content": m.content})
        if m.tool_calls and not m.content:  # the content of a generated turn already holds its calls
            conversation[-1]["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in m.tool_calls
            ]
    try:
        texts, _ = render_jinja_template(
            conversations=[conversation],
            tools=described or None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        raise TokenizerError(f"The chat template cannot render a conversation with tools ({error}).") from error
    return texts[0]


def format_calls(template: str, calls: Sequence[ToolCall]) -> str:
    """Tool calls as the template writes them in an assistant's turn.

    Raises:
        TokenizerError: the template refuses the conversation.
    """
    turn = render(template, [Message("user", ""), Message("assistant", "", tuple(calls))], [])
    text = render(template, [Message("user", ""), Message("assistant", _mark(0))], [])
    before, _, after = text.partition(_mark(0))
    return turn.removeprefix(before).removesuffix(after)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Every tool call of a generated turn, in order; text around the calls is allowed.

    Raises:
        ToolCallError: there is none, or one is not exactly `{"name": string, "arguments": object}` in strict JSON.
    """
    pieces = re.split(f"({re.escape(CALL_OPEN)}|{re.escape(CALL_CLOSE)})", text)
    bodies, tags = pieces[0::2], pieces[1::2]
    if not tags:
        raise ToolCallError(f"no tool call: write {CALL_OPEN}{{...}}{CALL_CLOSE}")
    if tags != [CALL_OPEN, CALL_CLOSE] * (len(tags) // 2):
        raise ToolCallError(f"every {CALL_OPEN} needs one {CALL_CLOSE} after it")
    return [_parse_call(body) for body in bodies[1::2]]


def _parse_call(body: str) -> ToolCall:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ToolCallError("the tool call names a key twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ToolCallError(f"the tool call is not JSON: {constant} is no number")

    try:
        call = json.loads(body, object_pairs_hook=unique, parse_constant=refuse)
        json.dumps(call, ensure_ascii=False).encode()  # a lone surrogate is no text
    except json.JSONDecodeError as error:
        raise ToolCallError(f"the tool call is not JSON: {error.msg} at character {error.pos}") from None
    except (UnicodeEncodeError, RecursionError, ValueError):
        raise ToolCallError("the tool call is not JSON: it holds something that is no text or number") from None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        raise ToolCallError("a tool call is an object with exactly the keys name and arguments")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise ToolCallError("in a tool call, name is a string and arguments is an object")
    return ToolCall(call["name"], call["arguments"])


class Chat:
    """A tokenizer with its chat template: how messages become ids.

    Attributes:
        template: the Jinja source, from the tokenizer's folder.
        end_token_id: the token that ends an assistant's turn; generation stops there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take a fast tokenizer that has a chat template.

        Raises:
            TokenizerError: it has none, or the template does not end a turn with a token of the vocabulary.
        """
        template = getattr(tokenizer, "chat_template", None)
        if not isinstance(template, str):
            raise TokenizerError(
                f"The tokenizer in {tokenizer.name_or_path or 'memory'} has no chat template: "
                "add one chat_template.jinja to its folder."
            )
        self.tokenizer = tokenizer
        self.template = template
        self._control = dict(tokenizer.get_added_vocab())
        self._rendering = threading.Lock()
        self._rendered: dict[tuple[object, ...], tuple[list[str], list[Tool]]] = {}
        after = render(self.template, [Message("user", ""), Message("assistant", _mark(0))], []).partition(_mark(0))[2]
        found = self._control_pattern.match(after)
        if found is None:
            raise TokenizerError(
                f"The chat template of {tokenizer.name_or_path or 'the tokenizer'} ends a turn with {after[:20]!r}, "
                "which is no special token: name one of the tokenizer's own there."
            )
        self.end_token_id: int = self._control[found[0]]

    @classmethod
    def load(cls, tokenizer_dir: Path | str) -> Chat:
        """Read a Hugging Face tokenizer folder.

        Raises:
            TokenizerError: it cannot be read or has no usable chat template.
        """
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(tokenizer_dir)))
        except (OSError, ValueError, KeyError) as error:
            raise TokenizerError(f"The tokenizer in {tokenizer_dir} cannot be read ({error}).") from error

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        # Longest first, as the tokenizer matches them.
        return re.compile("|".join(re.escape(t) for t in sorted(self._control, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer without its control tokens: for text that only looks like them."""
        from tokenizers import Tokenizer

        data = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def encode_generated(self, text: str) -> list[int]:
        """Ids of an assistant's text as a model would generate it: its tags are control tokens."""
        return self._encode_parts([(text, True)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, without the token that ends the turn."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] == self.end_token_id else token_ids
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence gives one text"
        return text

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Ids of the conversation's start, up to where the assistant begins to generate.

        Raises:
            TokenizerError: the template refuses the conversation.
        """
        return self._encode_parts(self._split(messages, tools))

    def encode_observations(self, observations: Sequence[str], tools: Sequence[Tool], ended: bool) -> list[int]:
        """Ids of the tool results after an assistant's turn; see `encode_continuation`."""
        return self.encode_continuation([Message("tool", o) for o in observations], tools, ended)

    def encode_continuation(self, messages: Sequence[Message], tools: Sequence[Tool], ended: bool) -> list[int]:
        """Ids of what follows an assistant's turn, up to where it begins to generate again.

        Args:
            messages: tool results in the order of the calls, or whatever else comes next.
            tools: the conversation's tools.
            ended: the turn ended with `end_token_id`; where it was cut, the token is added.

        Raises:
            TokenizerError: the template refuses the conversation.
        """
        messages = [Message("user", ""), Message("assistant", ""), *messages]
        ids = self._encode_parts(self._split(messages, tools, start_after=1))
        return ids[1:] if ended else ids

    def _split(
        self, messages: Sequence[Message], tools: Sequence[Tool], start_after: int | None = None
    ) -> list[tuple[str, bool]]:
        """Render up to where the assistant generates, and tell the template's own text (True) from the messages'.

        Args:
            messages: the conversation.
            tools: its tools.
            start_after: leave out everything up to the end of this message's content.
        """
        pieces = self._pieces(tuple(m.role for m in messages), tools)
        first = 0 if start_after is None else 2 * pieces[1::2].index(str(start_after)) + 2
        parts: list[tuple[str, bool]] = []
        for i, piece in enumerate(pieces[first:], first):
            parts += [(piece, True)] if i % 2 == 0 else _content(messages[int(piece)])
        return parts

    def _pieces(self, roles: tuple[str, ...], tools: Sequence[Tool]) -> list[str]:
        """The template's text around the contents of messages, and the messages' numbers between them."""
        key = (roles, *map(id, tools))
        found = self._rendered.get(key)
        if found is None:  # several threads may render the same
            text = render(self.template, [Message(r, _mark(i)) for i, r in enumerate(roles)], tools, True)
            # The tools are kept, since an id may be given again when its object is gone.
            found = re.split(_MARK, text), list(tools)
            with self._rendering:
                self._rendered[key] = found
                if len(self._rendered) > _MAX_RENDERED:  # the oldest goes
                    del self._rendered[next(iter(self._rendered))]
        return found[0]

    def _encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode text between control tokens as one piece, so that ids equal those of the whole text."""
        ids: list[int] = []
        text = ""
        for piece, is_template in parts:
            if not is_template:
                text += piece
                continue
            position = 0
            for match in self._control_pattern.finditer(piece):
                ids += [*self.encode_plain(text + piece[position : match.start()]), self._control[match[0]]]
                text, position = "", match.end()
            text += piece[position:]
        return ids + self.encode_plain(text)


def _content(message: Message) -> list[tuple[str, bool]]:
    """A message's content: of an assistant's, which holds its calls, their tags are the template's own text."""
    if message.role != "assistant":
        return [(message.content, False)]
    return [(piece, i % 2 == 1) for i, piece in enumerate(_CALL_TAGS.split(message.content))]
