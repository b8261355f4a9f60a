"""An agent of `composer autoinstall`: a conversation with an endpoint, whose tool calls are played in a sandbox.

It goes on until the agent's last tool says that it is over, or the agent runs out of turns, tokens or context. Wrong
calls are answered, so that the model can mend them; what fails on our side comes out as an error, and is never shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer.autoinstall.client import AskedCall, ContextFullError, Endpoint, Reply
from composer.contract import Sandbox, Tool, ToolResult
from composer.errors import ToolCallError
from composer.rollout.chat import CALL_CLOSE, CALL_OPEN, parse_tool_calls
from composer.rollout.harness import cut_middle
from composer.rollout.parts import call_tool
from composer.types import ToolCall

MAX_OBSERVATION_BYTES = 16 * 2**10
"""Of what a tool answered, shown to the model."""
_SILENT_TURNS_ALLOWED = 3
"""In a row, without a tool call that can be read."""

Played = Callable[[ToolCall, ToolResult], None]


@dataclass
class Conversation:
    """What was said, and what it took."""

    endpoint: Endpoint
    tools: Mapping[str, Tool]
    """By the names that the model calls."""
    sandbox: Sandbox
    progress: Callable[[str], None]
    played: Played = lambda call, result: None
    """Told of each call that was played."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """As they were sent, without the tools; the first is the system's."""
    num_turns: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def open(self, system: str, request: str) -> None:
        """Begin with what the agent has to do."""
        if not self.endpoint.config.native_tools:
            described = "\n".join(json.dumps(s["function"]) for s in self._specifications())
            system += (
                f"\n\nYou have these tools:\n{described}\n\nCall one by writing "
                f'{CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE} and nothing after it.'
            )
        self.messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]

    async def run(self) -> str:
        """Go on until the end.

        Returns:
            Empty if a tool ended it; else what the agent ran out of.

        Raises:
            GeneratorError: the endpoint gave no answer.
            SandboxError, ToolError: as of `composer.contract.Tool.call`.
        """
        start, config, silent = time.monotonic(), self.endpoint.config, 0
        try:
            while self.num_turns < config.max_turns:
                if self.num_tokens >= config.max_total_tokens:
                    return f"its {config.max_total_tokens} tokens were used up"
                try:
                    reply = await self.endpoint.ask(self.messages, self._specifications())
                except ContextFullError:
                    return f"its conversation did not fit the model any more after {self.num_turns} turns"
                self.num_turns += 1
                self.num_tokens += reply.tokens
                called, is_over = await self._play(reply)
                self.progress(f"turn {self.num_turns}: {', '.join(called) or 'no call'} ({self.num_tokens:,} tokens)")
                if is_over:
                    return ""
                silent = 0 if called else silent + 1
                if silent > _SILENT_TURNS_ALLOWED:
                    return f"it called no tool in {silent} turns one after another"
            return f"its {config.max_turns} turns were over"
        finally:
            self.seconds = time.monotonic() - start

    def to_dict(self) -> dict[str, Any]:
        """What it took, for the record."""
        return {
            "num_turns": self.num_turns,
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 1),
            **self.endpoint.to_dict(),
        }

    async def _play(self, reply: Reply) -> tuple[list[str], bool]:
        """Answer the model's calls; the names of those that could be read, and whether one of them ended it all."""
        if not self.endpoint.config.native_tools:
            return await self._play_text(reply.content)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if not reply.calls:
            self.messages += [message, {"role": "user", "content": self._reminder()}]
            return [], False
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
        self.messages.append(message)
        called, is_over = [], False
        for asked in reply.calls:
            # Every call must have an answer, also those behind the last one.
            result, read = ("not done: the work was handed in before", False) if is_over else (None, True)
            if result is None:
                result, read, is_over = await self._answer(asked)
            self.messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
            called += [asked.name] * read
        return called, is_over

    async def _play_text(self, content: str) -> tuple[list[str], bool]:
        self.messages.append({"role": "assistant", "content": content})
        called, answers, is_over = [], [], False
        try:
            calls = parse_tool_calls(content)
        except ToolCallError as error:
            answers = [f"error: {error}. {self._reminder()}"]
            calls = []
        for call in calls:
            if not is_over:
                answer, read, is_over = await self._answer(AskedCall("", call.name, json.dumps(call.arguments)))
                answers.append(f"<tool_response>\n{answer}\n</tool_response>")
                called += [call.name] * read
        self.messages.append({"role": "user", "content": "\n".join(answers) or self._reminder()})
        return called, is_over

    async def _answer(self, asked: AskedCall) -> tuple[str, bool, bool]:
        """What the model sees of a call, whether it could be read, and whether it was the last."""
        tool = self.tools.get(asked.name)
        if tool is None:
            return f"error: no tool {asked.name!r}: the tools are {', '.join(self.tools)}", False, False
        try:
            arguments = json.loads(asked.arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # half a character is none of UTF-8
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are no JSON ({error})", False, False
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object", False, False
        call = ToolCall(asked.name, arguments)
        result = await call_tool(tool, call, self.sandbox)
        self.played(call, result)
        return cut_middle(result.content, MAX_OBSERVATION_BYTES) or "(no output)", True, result.ends_episode

    def _reminder(self) -> str:
        return f"Go on by calling a tool; `{list(self.tools)[-1]}` is how you hand in."

    def _specifications(self) -> Sequence[Mapping[str, Any]]:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools.values()
        ]
