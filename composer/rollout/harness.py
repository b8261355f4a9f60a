"""The agent loop: query, parse, execute, observe, until the model finishes or runs into a limit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from composer.contract import ExecResult, Sandbox, Tool
from composer.errors import GeneratorError, ToolCallError
from composer.rollout.chat import Chat, parse_tool_calls
from composer.rollout.conversation import Conversation
from composer.rollout.parts import call_tool
from composer.types import Generation, Message, Outcome, ToolCall, Turn


class Generate(Protocol):
    """Asks the policy for one turn."""

    async def __call__(self, token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
        """Continue `token_ids` until the chat's end token (part of the answer) or `max_tokens`.

        Args:
            token_ids: the whole context, [T].
            max_tokens: the most that may be generated; T + max_tokens fits the model.
            episode_id: stays the same in an episode, so that its turns can share a replica's cache.

        Raises:
            GeneratorError: the engine failed or did not answer before its deadline.
        """
        ...


@dataclass(frozen=True)
class HarnessLimits:
    """What an episode may use; named as in `composer.schema.EnvConfig`."""

    max_turns: int = 8
    max_turn_tokens: int = 128
    """Tokens one turn may generate."""
    max_model_len: int = 512
    """Tokens of the whole episode, prompt and tool results included."""
    max_observation_bytes: int = 4096
    """A tool result is cut in the middle beyond this."""
    invalid_calls_allowed: int = 0
    """How many malformed turns are answered with an error before the episode ends."""


@dataclass
class ToolClock:
    """Tells the agent's time from its tools': commands in the sandbox are its doing, a tool's own waits are not."""

    command_s: float = 0.0
    """Wall time of commands in the sandbox so far."""
    stuck: str = ""
    """The tool that was cut short outside of a command, if one was."""

    @contextmanager
    def running(self, tool: str, sandbox: Sandbox) -> Iterator[Sandbox]:
        """The sandbox as `tool` may use it: commands are timed, also those that are cut short."""
        timed = _TimedSandbox(sandbox, self)
        self.stuck = tool
        yield cast("Sandbox", timed)
        self.stuck = ""

    @contextmanager
    def command(self) -> Iterator[None]:
        """Time a command."""
        tool, self.stuck, start = self.stuck, "", time.monotonic()
        try:
            yield
            self.stuck = tool
        finally:
            self.command_s += time.monotonic() - start


class _TimedSandbox:
    """A sandbox whose commands are timed."""

    def __init__(self, sandbox: Sandbox, clock: ToolClock) -> None:
        self._sandbox, self._clock = sandbox, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    @property
    def unwrapped(self) -> Sandbox:
        """The sandbox itself, the same in every call of an episode: what tools remember is kept by it."""
        return self._sandbox

    async def shell(self, *args: Any, **kwargs: Any) -> ExecResult:
        with self._clock.command():
            return await self._sandbox.shell(*args, **kwargs)

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        with self._clock.command():
            return await self._sandbox.exec(*args, **kwargs)


class Recording(Protocol):
    """What a harness writes while an episode runs: all of it is there also when an error comes out."""

    turns: list[Turn]
    messages: list[Message]
    metadata: dict[str, Any]
    """Goes into the trajectory's."""


class Plays(Protocol):
    """What `run_episode` needs of a harness: the product's own (`Harness`), or a program of somebody else's."""

    tools: dict[str, Tool]

    def open(self, request: str, with_prompt: bool = True) -> Any:
        """A `Recording` of an episode that is about to begin, as `run` takes it."""
        ...

    async def run(
        self, conversation: Any, sandbox: Sandbox, generate: Generate, episode_id: str, clock: ToolClock, /
    ) -> Outcome:
        """Go on until the episode ends.

        Raises:
            GeneratorError: the policy did not answer.
            SandboxError: the sandbox failed.
            ToolError: a part of the env broke its contract.
        """
        ...


class Harness:
    """Runs a policy with tools in a sandbox; holds nothing of an episode, so that one serves all."""

    def __init__(self, chat: Chat, tools: Sequence[Tool], system_prompt: str, limits: HarnessLimits) -> None:
        """Put the parts together."""
        self.chat, self.system_prompt, self.limits = chat, system_prompt, limits
        self.tools = {tool.name: tool for tool in tools}

    def open(self, request: str, with_prompt: bool = True) -> Conversation:
        """A conversation that starts with the request, after a system message or without one."""
        if not with_prompt:
            return Conversation(self.chat, [], "", request)
        return Conversation(self.chat, list(self.tools.values()), self.system_prompt, request)

    async def run(
        self, conversation: Conversation, sandbox: Sandbox, generate: Generate, episode_id: str, clock: ToolClock
    ) -> Outcome:
        """Go on until the episode ends; all that happened is in the conversation, also when an error comes out.

        Raises:
            GeneratorError: the policy did not answer.
            SandboxError: the sandbox failed.
            ToolError: a tool broke its contract.
        """
        limits = self.limits
        while True:
            # Query.
            room = limits.max_model_len - len(conversation.ids)
            if room < 1:
                return Outcome.CONTEXT_FULL
            start = time.monotonic()
            max_tokens = min(limits.max_turn_tokens, room)
            generation = await generate(list(conversation.ids), max_tokens=max_tokens, episode_id=episode_id)
            check_generation(generation, episode_id)
            conversation.add_generation(generation, time.monotonic() - start)
            if generation.finish_reason == "length" and max_tokens == room:
                return Outcome.CONTEXT_FULL
            last_turn = len(conversation.turns) >= limits.max_turns

            # Parse, execute.
            finished = False
            try:
                calls = self._parse(conversation)
            except ToolCallError as error:
                conversation.num_invalid_calls += 1
                observations = [f"error: {error}"]
            else:
                observations, finished = await execute(calls, self.tools, sandbox, limits.max_observation_bytes, clock)

            # Observe.
            too_many = conversation.num_invalid_calls > limits.invalid_calls_allowed
            conversation.add_observations(observations, continues=not (finished or too_many or last_turn))
            conversation.turns[-1].seconds = time.monotonic() - start
            if finished:
                return Outcome.FINISHED
            if too_many:
                return Outcome.INVALID_CALL
            if last_turn:
                return Outcome.MAX_TURNS

    def _parse(self, conversation: Conversation) -> list[ToolCall]:
        calls = parse_tool_calls(conversation.messages[-1].content)
        conversation.add_calls(calls)
        for call in calls:
            if call.name not in self.tools:
                raise ToolCallError(f"no tool {call.name!r}: the tools are {', '.join(self.tools)}")
        return calls


def check_generation(generation: Generation, episode_id: str) -> None:
    """Make sure that the policy has said something, and to an end.

    Raises:
        GeneratorError: it has not.
    """
    if generation.finish_reason not in ("stop", "length") or not generation.token_ids:
        raise GeneratorError(
            f"The generator ended a turn of episode {episode_id} with {generation.finish_reason!r} after "
            f"{len(generation.token_ids)} tokens: look at the generator's log."
        )


async def execute(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    sandbox: Sandbox,
    max_observation_bytes: int,
    clock: ToolClock | None = None,
) -> tuple[list[str], bool]:
    """Run calls in order, up to the one that ends the episode.

    Returns:
        What each call that ran answered, as shown to the model, and whether the episode ends.

    Raises:
        SandboxError: the sandbox failed.
        ToolError: a tool broke its contract.
    """
    observations, clock = [], clock or ToolClock()
    for call in calls:
        with clock.running(call.name, sandbox) as timed:
            result = await call_tool(tools[call.name], call, timed)
        observations.append(cut_middle(result.content, max_observation_bytes))
        if result.ends_episode:
            return observations, True
    return observations, False


def cut_middle(text: str, max_bytes: int) -> str:
    r"""Leave out the middle of a text longer than `max_bytes` in UTF-8 and say how much; never half a character.

    What UTF-8 cannot hold (a lone surrogate) becomes a question mark.

    Example:
        >>> cut_middle("aaaabbbbcccc", 4)
        'aa\n[... 8 bytes left out ...]\ncc'
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    head = data[: (max_bytes + 1) // 2].decode(errors="ignore")
    tail = data[len(data) - max_bytes // 2 :].decode(errors="ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... {left_out} bytes left out ...]\n{tail}"
