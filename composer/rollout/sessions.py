"""Sessions of a taskset's scripted expert: what the model reads before RL.

The expert's calls run in real sandboxes with the env's own tools. A session is kept as text, so that a tokenizer can be
trained on it; its ids come from the same `Conversation` as those of live episodes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer.contract import SandboxBackend, SandboxLimits, Taskset, Tool
from composer.errors import ToolError
from composer.rollout.chat import Chat, format_calls, render
from composer.rollout.conversation import Conversation
from composer.rollout.harness import ToolClock, execute
from composer.rollout.parts import begin_tools, make_task, play_expert
from composer.rollout.prepare import prepare
from composer.types import Generation, Message, Split, Task, ToolCall


@dataclass(frozen=True)
class Session:
    """Turns of one or more calls, and what the tools answered to each; the last call ends the episode."""

    task_id: str
    request: str
    turns: list[list[ToolCall]]
    observations: list[list[str]]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Session:
        """The inverse of `to_dict`."""
        turns = [[ToolCall(**call) for call in turn] for turn in d["turns"]]
        return cls(d["task_id"], d["request"], turns, [list(answers) for answers in d["observations"]])


async def record_session(
    task: Task,
    turns: Sequence[Sequence[ToolCall]],
    tools: Sequence[Tool],
    backend: SandboxBackend,
    limits: SandboxLimits,
    max_observation_bytes: int,
    timeout_s: float = 120.0,
) -> Session:
    """Run the calls, turn by turn, in a sandbox of the task.

    Raises:
        SandboxError: the sandbox failed.
        TaskError: the task's setup failed.
        ToolError: a tool broke its contract, or all calls together took longer than `timeout_s`.
    """
    by_name, clock = {tool.name: tool for tool in tools}, ToolClock()
    session = Session(task.id, task.request, [], [])
    sandbox = await prepare(task, backend, limits)
    try:
        async with asyncio.timeout(timeout_s):
            await begin_tools(tools, sandbox)
            for turn in turns:
                answers, ended = await execute(turn, by_name, sandbox, max_observation_bytes, clock)
                session.turns.append(list(turn[: len(answers)]))
                session.observations.append(answers)
                if ended:
                    break
    except TimeoutError:
        who = f"tool {clock.stuck!r}" if clock.stuck else "a command"
        raise ToolError(
            f"{who} did not end within {timeout_s:g} s when the expert played task {task.id}: give every wait a "
            "deadline, or raise env.episode_timeout_s"
        ) from None
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
    return session


async def record_sessions(
    taskset: Taskset,
    count: int,
    *,
    tools: Sequence[Tool],
    backend: SandboxBackend,
    limits: SandboxLimits | None = None,
    max_observation_bytes: int = 4096,
    first_index: int = 0,
    seed: int = 0,
    concurrency: int = 16,
    timeout_s: float = 120.0,
    progress: Callable[[int], None] | None = None,
) -> list[Session]:
    """Record the expert on `count` training tasks in a row.

    Args:
        taskset: gives the tasks and the expert.
        count: how many sessions.
        tools: the env's tools.
        backend: starts the sandboxes.
        limits: of each sandbox.
        max_observation_bytes: the env's; a longer tool result is cut in the middle.
        first_index: index of the first task in the training split.
        seed: decides, with the task, when the expert is wrong.
        concurrency: sandboxes at a time.
        timeout_s: wall time of one session.
        progress: told after each session how many are done.

    Raises:
        TaskError: the taskset or its expert broke; see `composer.rollout.parts`.
        ToolError: a tool broke its contract.
        SandboxError: a sandbox failed.
    """
    sessions: list[Session | None] = [None] * count
    numbers, finished = iter(range(count)), itertools.count(1)

    async def work() -> None:
        for i in numbers:
            task = make_task(taskset, Split.TRAIN, first_index + i)
            turns = play_expert(taskset, task, seed, {tool.name: tool for tool in tools})
            sessions[i] = await record_session(
                task, turns, tools, backend, limits or SandboxLimits(), max_observation_bytes, timeout_s
            )
            if progress is not None:
                progress(next(finished))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, count)):
                workers.create_task(work())
    except ExceptionGroup as failures:  # one cause says it all; the other workers were cancelled
        raise failures.exceptions[0] from None
    return [s for s in sessions if s is not None]


def session_text(session: Session, template: str, tools: Sequence[Tool], system_prompt: str) -> str:
    """The session as text, to train a tokenizer on; `template` is a Jinja source of `composer.rollout.chat`."""
    messages = [Message("system", system_prompt)] if system_prompt else []
    messages.append(Message("user", session.request))
    for calls, answers in zip(session.turns, session.observations, strict=True):
        messages += [Message("assistant", "", tuple(calls)), *(Message("tool", answer) for answer in answers)]
    return render(template, messages[: -len(session.observations[-1])], tools)


def render_session(
    session: Session, chat: Chat, tools: Sequence[Tool], system_prompt: str
) -> tuple[list[int], list[bool]]:
    """The session as a live episode would have recorded it.

    Returns:
        Token ids, [T], and the loss mask, [T], true at what the assistant wrote, ends of turns included.
    """
    conversation = Conversation(chat, tools, system_prompt, session.request)
    for number, (calls, answers) in enumerate(zip(session.turns, session.observations, strict=True), start=1):
        ids = [*chat.encode_generated(format_calls(chat.template, calls)), chat.end_token_id]
        conversation.add_generation(Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
        conversation.add_calls(calls)
        conversation.add_observations(answers, continues=number < len(session.turns))
    return conversation.ids, conversation.loss_mask
