"""The first agent: reads a repository and names commands that a developer would run, with what they print.

Commands that say nothing about an environment are refused, and it sees why: `commands.unfit` looks at the text, then
each is run on the bare machine, where it must not work yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from composer.autoinstall import commands
from composer.autoinstall.client import Endpoint
from composer.autoinstall.commands import Command
from composer.autoinstall.conversation import Conversation
from composer.autoinstall.verify import Verifier, started
from composer.contract import Sandbox, Tool, ToolResult

_SYSTEM = """\
You look at a software repository and name commands that a developer of it would run on a machine that is set up for \
it: its tests or parts of them, linters, a build, the program itself. For each you say what it prints when all is well.

Somebody else will then set up a machine, and succeed when commands of yours give your expected output. So each one:
- runs by itself in the repository's folder, where nothing is left of other commands: build first what it needs;
- depends on the repository's files: its output must be another one if those were broken;
- has expected output that you can tell from the repository: names of tests, counts, results; no durations, no dates;
- does not work on a bare machine without the repository's dependencies, configuration or build;
- needs neither the network nor anything that a test machine cannot have.
All are different from one another, and look at different parts of the repository where it has several.

The repository's folder is your working directory. You cannot change it. Hand in with `propose`; what is refused is \
named with the reason, and what was accepted is kept."""
_REQUEST = "Look at the repository, then propose {number} commands."


class Propose:
    """The proposer's last tool: takes commands, keeps the fit ones, and ends when there are enough."""

    name = "propose"
    description = "Hand in commands with their expected output."

    def __init__(self, verifier: Verifier, number: int) -> None:
        """Nothing is accepted yet.

        Args:
            verifier: runs commands on the bare machine.
            number: of commands that are enough.
        """
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"commands": {"type": "array", "items": commands.SCHEMA, "minItems": 1, "maxItems": 50}},
            "required": ["commands"],
            "additionalProperties": False,
        }
        self._verifier, self._number = verifier, number
        self._validator = Draft202012Validator(commands.SCHEMA)
        self.accepted: list[Command] = []
        self.refused: list[dict[str, str]] = []

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with what was refused and why; see `composer.contract.Tool`."""
        given = arguments.get("commands")
        if not isinstance(given, list) or not given:
            return ToolResult("error: `commands` must be a list of commands", ok=False)
        answers = []
        for number, item in enumerate(given, 1):
            if len(self.accepted) == self._number:
                break
            reason = await self._refusal(item)
            shown = str(item.get("command", "")) if isinstance(item, dict) else ""
            if reason:
                self.refused.append({"command": shown[:500], "reason": reason})
                answers.append(f"{number}. refused: `{shown[:200]}`: {reason}")
        missing = self._number - len(self.accepted)
        if not missing:
            return ToolResult("all are accepted", ends_episode=True)
        answers.append(f"{len(self.accepted)} are accepted and kept; propose {missing} more, different from those.")
        return ToolResult("\n".join(answers), ok=False)

    async def _refusal(self, item: Any) -> str:
        for error in self._validator.iter_errors(item):
            where = f"{'.'.join(map(str, error.path))}: " if error.path else ""
            return f"{where}{error.message[:200]}"
        command = Command.from_dict(item)
        reason = commands.unfit(command, self.accepted) or await self._verifier.on_bare_machine(command)
        if not reason:
            self.accepted.append(command)
        return reason


@dataclass(frozen=True)
class Proposal:
    """What the proposer came to."""

    commands: list[Command]
    refused: list[dict[str, str]]
    trouble: str
    """Why there are too few commands; empty if there are not."""
    agent: dict[str, Any]
    """Its model and what it took."""
    messages: list[dict[str, Any]] = field(default_factory=list)


async def propose(
    verifier: Verifier, endpoint: Endpoint, tools: Sequence[Tool], number: int, progress: Callable[[str], None]
) -> Proposal:
    """Let the first agent work.

    Args:
        verifier: of the repository.
        endpoint: the agent's model.
        tools: to look at the repository with.
        number: of commands.
        progress: told of every turn.

    Raises:
        GeneratorError: the endpoint gave no answer.
        SandboxError, ToolError: a sandbox or a tool failed.
    """
    last = Propose(verifier, number)
    async with started(verifier.backend, verifier.repository.files, verifier.limits) as sandbox:
        talk = Conversation(endpoint, {tool.name: tool for tool in (*tools, last)}, sandbox, progress)
        talk.open(_SYSTEM, _REQUEST.format(number=number))
        trouble = await talk.run()
    if trouble:
        trouble = f"the proposer named {len(last.accepted)} fit commands of {number}: {trouble}"
    return Proposal(last.accepted, last.refused, trouble, talk.to_dict(), talk.messages)


def choose(proposed: Sequence[Command], number: int, seed: int, repository_sha256: str) -> list[Command]:
    """Some of the commands, by chance, in their order: the same for one seed and one state of a repository."""
    chance = random.Random(f"{seed}/{repository_sha256}")
    chosen = set(chance.sample(range(len(proposed)), min(number, len(proposed))))
    return [command for i, command in enumerate(proposed) if i in chosen]
