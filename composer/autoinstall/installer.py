"""The second agent: sets up a machine until the chosen commands do what is expected, in a few tries.

It works in one sandbox and hands in as often as it may. Each time a copy of the machine is looked at and the commands
run on copies of that, where it has no hand in them (verify.py), and it is told what differed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from composer.autoinstall.client import Endpoint
from composer.autoinstall.commands import Command
from composer.autoinstall.conversation import Conversation
from composer.autoinstall.guards import Declared
from composer.autoinstall.inventory import Inventory, take_inventory
from composer.autoinstall.script import RUN, Script
from composer.autoinstall.verify import Verdict, Verifier, started
from composer.contract import Sandbox, Snapshot, Tool, ToolResult
from composer.types import ToolCall

_SYSTEM = """\
You set up a machine for a software repository, so that commands of a developer give the output that is expected of \
them. The repository's folder, {workdir}, is your working directory. You are not root.

You have {tries} tries. When you hand in with `submit`, each command runs by itself on a copy of your machine, with \
the repository's files put there anew, and you are told what differed. Nothing that runs now will be running there.

What counts is that the software really works:
- Install what it needs, build it in place, generate what it expects. Use package managers; install Python packages of \
this repository in place (`pip install -e .`), never as a copy.
- What cannot be had on this machine (a database, a GPU, an outside service, a package that no index has) you may \
replace by a mock: code that behaves as the real thing would. Declare every mock, and keep it as true as you can.
- Declare whatever else you add to the repository's folder as generated. Variables that commands need go into \
`variables`: nothing of your shell's is there.
- The repository's own files stay as they are. Never write expected output anywhere, put no program in place of one \
that a command names, and add nothing that test runners load by themselves (conftest.py, sitecustomize.py, ...).
What works in your shell goes into an install script, so do each step by a command that succeeds."""
_REQUEST = "Set up the machine for these commands:\n\n{commands}"
_TEXT = {"type": "string", "maxLength": 2000, "pattern": "^[^\\u0000]*$"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT, "maxProperties": 100}
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mocks": {**_TEXTS, "description": "path of each mock -> what it stands for and what it does not do"},
        "generated": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "maxItems": 200,
            "description": "other files and folders that you added to the repository's folder",
        },
        "variables": {
            **_TEXTS,
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "description": "environment variables that every command gets",
        },
    },
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Try:
    """One time that the installer handed in."""

    verdict: Verdict
    declared: Declared
    num_steps: int
    """Of the script until then."""


class Submit:
    """The installer's last tool: verifies, and ends when all is well or no try is left."""

    name = "submit"
    description = "Hand in the machine as it is now; the commands are then verified on a copy of it."
    parameters = _PARAMETERS

    def __init__(
        self, verifier: Verifier, commands: Sequence[Command], before: Inventory, tries: int, script: Script
    ) -> None:
        """Nothing was handed in yet.

        Args:
            verifier: of the repository.
            commands: that have to work.
            before: what was on the machine before the installer came.
            tries: how many there are.
            script: what it has done so far.
        """
        self._verifier, self._commands, self._before, self._num = verifier, commands, before, tries
        self._script = script
        self._validator = Draft202012Validator(_PARAMETERS)
        self.tries: list[Try] = []
        self.snapshot: Snapshot | None = None
        """Of the machine that passed."""

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the verdict; see `composer.contract.Tool`."""
        for error in self._validator.iter_errors(dict(arguments)):
            where = f"{'.'.join(map(str, error.path))}: " if error.path else ""
            return ToolResult(f"error: {where}{error.message[:200]} (this was no try)", ok=False)
        declared = Declared(
            dict(arguments.get("mocks", {})),
            tuple(arguments.get("generated", ())),
            dict(arguments.get("variables", {})),
        )
        verdict, snapshot = await verify(self._verifier, sandbox, self._before, declared, self._commands)
        self.tries.append(Try(verdict, declared, len(self._script.steps)))
        if verdict.ok:
            self.snapshot = snapshot
            return ToolResult("all commands give what is expected", ends_episode=True)
        left = self._num - len(self.tries)
        if verdict.faults:
            await self._verifier.put_back(sandbox)
        return ToolResult(f"{verdict.told()}\n\n{left} tries are left.", ok=False, ends_episode=left <= 0)


async def verify(
    verifier: Verifier, sandbox: Sandbox, before: Inventory, declared: Declared, commands: Sequence[Command]
) -> tuple[Verdict, Snapshot | None]:
    """Verify a machine as it is now, on copies of it.

    Returns:
        The verdict, and the snapshot of the machine without the repository if it is good; the caller drops it.

    Raises:
        SandboxError: a sandbox failed.
    """
    start = time.monotonic()
    copy = await _fork(sandbox)
    if isinstance(copy, str):
        return Verdict((copy,), {}, time.monotonic() - start), None
    try:
        faults = await verifier.look(copy, before, declared, commands)
        if faults:
            return Verdict(tuple(faults), {}, time.monotonic() - start), None
        try:
            snapshot = await verifier.without_repository(copy)
        except OSError as error:
            return Verdict((f"the machine cannot be kept ({error.strerror}): remove what is not needed",), {}), None
    finally:
        await copy.stop()
    differences: Mapping[str, str] = {"": ""}
    try:
        differences = await verifier.differences(snapshot, declared.variables, commands)
    finally:
        if differences:
            await verifier.backend.drop(snapshot)
    return Verdict((), differences, time.monotonic() - start), None if differences else snapshot


async def _fork(sandbox: Sandbox) -> Sandbox | str:
    try:
        return await sandbox.fork()
    except OSError as error:
        return f"the machine cannot be copied ({error.strerror}): remove what is not needed"


@dataclass(frozen=True)
class Installation:
    """What the installer came to."""

    snapshot: Snapshot | None
    """Of the machine that passed, without the repository; None: the repository is dropped."""
    tries: list[Try]
    trouble: str
    """Why it is dropped."""
    script: str
    replay: str
    """Why the script does not lead to the same verdict; empty if it does."""
    workdir: str
    agent: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)


async def install(
    verifier: Verifier,
    endpoint: Endpoint,
    tools: Sequence[Tool],
    commands: Sequence[Command],
    tries: int,
    progress: Callable[[str], None],
) -> Installation:
    """Let the second agent work, then try out its script.

    Args:
        verifier: of the repository.
        endpoint: the agent's model.
        tools: to set up the machine with.
        commands: that have to work.
        tries: how often it may hand in.
        progress: told of every turn.

    Raises:
        GeneratorError: the endpoint gave no answer.
        SandboxError, ToolError: a sandbox or a tool failed.
    """
    async with started(verifier.backend, verifier.repository.files, verifier.limits) as sandbox:
        before, script = await take_inventory(sandbox), Script(sandbox.workdir)
        last = Submit(verifier, commands, before, tries, script)

        def played(call: ToolCall, result: ToolResult) -> None:
            if call.name != last.name:
                script.add(call, result)

        talk = Conversation(endpoint, {tool.name: tool for tool in (*tools, last)}, sandbox, progress, played)
        talk.open(
            _SYSTEM.format(workdir=sandbox.workdir, tries=tries),
            _REQUEST.format(commands="\n".join(json.dumps(command.to_dict(), indent=1) for command in commands)),
        )
        ended = await talk.run()
        workdir = sandbox.workdir
    name = verifier.repository.name
    if last.snapshot is None:
        why = last.tries[-1].verdict.summary()[0] if last.tries else "nothing was handed in"
        trouble = f"no environment in {len(last.tries)} tries{f', then {ended}' if ended else ''}: {why}"
        return Installation(None, last.tries, trouble, script.text(name), "", workdir, talk.to_dict(), talk.messages)
    passed = last.tries[-1].declared
    text = script.text(name, sorted(passed.variables))
    progress("the install script is tried out")
    try:
        replay = await _replay(verifier, text, before, passed, commands)
    except BaseException:
        await verifier.backend.drop(last.snapshot)
        raise
    return Installation(last.snapshot, last.tries, "", text, replay, workdir, talk.to_dict(), talk.messages)


async def _replay(
    verifier: Verifier, script: str, before: Inventory, declared: Declared, commands: Sequence[Command]
) -> str:
    """Why a fresh machine is no such environment after the script; empty if it is."""
    place = "/tmp/install.sh"
    async with started(verifier.backend, verifier.repository.files, verifier.limits) as sandbox:
        await sandbox.write(place, script.encode())
        done = await sandbox.exec(["sh", "-c", RUN, "sh", place])
        if done.timed_out:
            return f"the script was stopped after {done.seconds:.0f} s"
        await sandbox.exec(["/bin/rm", "-f", place])
        verdict, snapshot = await verify(verifier, sandbox, before, declared, commands)
        if snapshot is not None:
            await verifier.backend.drop(snapshot)
        return "; ".join(verdict.summary())
