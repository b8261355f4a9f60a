"""A harness that is somebody else's program: it runs unchanged in the episode's sandbox, and asks the gateway.

The program decides what is asked when, runs the commands that the policy wants, and ends when it likes. It hands in
when it ends by itself, whatever its exit code; what it left behind is then graded. An episode in which the program
ended without having asked anything has no reward: it could not have been the policy's doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer.contract import ExecResult, Sandbox, Tool
from composer.errors import GeneratorError, SandboxError, ToolError
from composer.gateway.channel import RELAY, Channel
from composer.gateway.exchange import OfferedTool
from composer.gateway.record import EpisodeRecord
from composer.gateway.relay import CUT_OFF, SETTINGS
from composer.gateway.server import MODEL, Gateway
from composer.rollout.chat import Chat
from composer.rollout.harness import Generate, HarnessLimits, ToolClock
from composer.types import Message, Outcome

PORT = 41184
"""Where an agent finds the gateway on its sandbox's loopback."""
_GRACE_S = 10.0
"""For an agent to end by itself after the last answer that it will get."""
_FOREVER_S = 10**6
"""The episode's own deadline comes first."""
_MAX_QUOTED = 1000


@dataclass(frozen=True)
class AgentProgram:
    """The program; named as in `composer.schema.AgentConfig`."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path in the sandbox -> text."""

    @classmethod
    def from_config(cls, agent: Any) -> AgentProgram | None:
        """The program of an `AgentConfig`, if it names one."""
        if not agent.command:
            return None
        return cls(tuple(agent.command), dict(agent.environment), {f.path: f.text for f in agent.files.values()})


class ExternalHarness:
    """Runs an agent's program where `composer.rollout.harness.Harness` would run the product's own loop."""

    def __init__(self, program: AgentProgram, chat: Chat, limits: HarnessLimits) -> None:
        """Nothing listens before the first episode.

        Raises:
            TokenizerError: the chat template cannot render a conversation with tools.
        """
        tool: Any = OfferedTool("shell", "", {"type": "object", "properties": {}})
        chat.encode_prompt([Message("system", ""), Message("user", "")], [tool])
        chat.encode_continuation([Message("tool", ""), Message("user", "")], [tool], ended=True)
        self.program, self.chat, self.limits = program, chat, limits
        self.tools: dict[str, Tool] = {}
        self.gateway = Gateway()

    def open(self, request: str, with_prompt: bool = True) -> EpisodeRecord:
        """The record of an episode; its prompts are the agent's own."""
        return EpisodeRecord(self.chat, self.limits, request)

    async def run(
        self, record: EpisodeRecord, sandbox: Sandbox, generate: Generate, episode_id: str, clock: ToolClock
    ) -> Outcome:
        """Run the program to its end, or to a limit; all that it asked is in the record, also when an error comes out.

        Raises:
            GeneratorError: the policy did not answer, or the gateway broke.
            SandboxError: the sandbox failed.
            ToolError: the program ended before it had asked anything.
        """
        await self.gateway.start()
        record.open(generate, episode_id)
        started = time.monotonic()
        try:
            with self.gateway.serving(record) as key:
                result, exit_code = await self._run(record, sandbox, key)
        finally:
            record.close()
            # What the agent did by itself is its time, as commands are of the product's own harness.
            clock.command_s += time.monotonic() - started - record.asked_s
        if record.failure is not None:
            raise record.failure
        if record.limit is not None:
            return record.limit
        if not record.turns:
            raise ToolError(
                f"the agent's program {self.program.command[0]!r} ended with exit code {exit_code} before it had asked "
                f"the model anything; it said {_tail(result)!r}: mend env.agent"
            )
        record.metadata["agent"] = {"exit_code": exit_code, "output": _tail(result)}
        return Outcome.FINISHED

    async def close(self) -> None:
        """Serve no more. Idempotent."""
        await self.gateway.stop()

    async def _run(self, record: EpisodeRecord, sandbox: Sandbox, key: str) -> tuple[ExecResult | None, int | None]:
        """What the relay left, and the agent's exit code; nothing of both if the agent had to be ended."""
        for path, text in self.program.files.items():
            try:
                await sandbox.write(path, text.encode())
            except OSError as error:
                raise SandboxError(f"env.agent.files: {path!r} cannot be written in the sandbox: {error}") from error
        ours, theirs = socket.socketpair()
        channel = Channel(self.gateway.port, lambda error: record.fail(_unreachable(error)))
        command, settings = self.relayed(record.request, key)
        carrying = asyncio.create_task(channel.carry(ours))
        running = asyncio.create_task(sandbox.exec(command, env=settings, channel=theirs, timeout_s=_FOREVER_S))
        ended = asyncio.create_task(record.ended.wait())
        try:
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and record.failure is None:
                await asyncio.wait({running}, timeout=_GRACE_S)
            if not running.done():
                return None, None
            result = await running
            with contextlib.suppress(TimeoutError):  # its last frame may still be on its way
                await asyncio.wait_for(asyncio.shield(carrying), _GRACE_S)
            if result.exit_code == CUT_OFF and channel.exit_code is None and not channel.has_hung_up:
                raise SandboxError(
                    "the channel to the agent's sandbox broke: the sandbox's backend did not hold it open"
                )
            return result, channel.exit_code if channel.exit_code is not None else result.exit_code
        finally:
            await _end(running, ended, carrying)

    def relayed(self, request: str, key: str) -> tuple[list[str], dict[str, str]]:
        """The command that runs in the sandbox, and its variables: unlike a command line, others may not read those."""
        given = {
            "{base_url}": f"http://127.0.0.1:{PORT}",
            "{api_key}": key,
            "{model}": MODEL,
            "{request}": request,
        }
        settings = {
            "command": [fill_in(word, given) for word in self.program.command],
            "environment": {name: fill_in(value, given) for name, value in self.program.environment.items()},
        }
        return ["python3", "-c", RELAY, str(PORT)], {SETTINGS: json.dumps(settings)}


def fill_in(text: str, given: Mapping[str, str]) -> str:
    """`text` with its placeholders replaced; what they are replaced by is not looked at again.

    Example:
        >>> fill_in("{a}/{b}", {"{a}": "{b}", "{b}": "1"})
        '{b}/1'
    """
    first = min((text.find(name) for name in given if name in text), default=-1)
    if first < 0:
        return text
    name = next(name for name in given if text.startswith(name, first))
    return text[:first] + given[name] + fill_in(text[first + len(name) :], given)


def _unreachable(error: Exception) -> GeneratorError:
    return GeneratorError(
        f"the agent's connection to the gateway broke ({type(error).__name__}: {error}): look for its cause in this "
        "process's log; too many open files are a matter of env.concurrency"
    )


def _tail(result: ExecResult | None) -> str:
    return result.output[-_MAX_QUOTED:].decode(errors="replace").strip() if result is not None else ""


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
