"""Runs commands out of an agent's reach: each in a fresh sandbox, on the repository's own files.

The base of such a sandbox is a snapshot of the installer's machine in which the repository's files are not: they are
put there anew from where they were read. So nothing that the installer did to them counts, and tasks that change them
start from the same snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

from composer.autoinstall import guards
from composer.autoinstall.commands import PRINTED, Command, programs
from composer.autoinstall.guards import Declared, Machine
from composer.autoinstall.inventory import Inventory, resolve, take_inventory
from composer.autoinstall.repository import Repository
from composer.contract import ExecResult, Sandbox, SandboxBackend, SandboxLimits, Snapshot

GARBLED = b"\0)]}'<<<<<<< \xff garbled\n"
"""What the files of the control hold: no source, no test and no configuration in any language."""
_SYSTEM_PATH = {"PATH": "/usr/bin:/bin"}
# What was compiled holds the strings of its sources.
_GREP = 'echo x | grep -qI x 2>/dev/null && text=-I; xargs -0 grep -lF $text "$@" --'
_CACHES = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache")


@dataclass(frozen=True)
class Verdict:
    """What became of one try."""

    faults: tuple[str, ...]
    """What was found on the machine (guards.py); the commands were then not run."""
    differences: Mapping[str, str]
    """Command -> what its output lacks."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the environment is one."""
        return not self.faults and not self.differences

    def told(self) -> str:
        """What the installer is told."""
        lines = [f"- {fault}" for fault in self.faults]
        lines += [f"- `{command}`: {difference}" for command, difference in self.differences.items()]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """A line each, for the record."""
        return [*self.faults, *(f"{c}: {d.partition(PRINTED)[0]}" for c, d in self.differences.items())]


@dataclass(frozen=True)
class Verifier:
    """Verifies commands on one repository."""

    repository: Repository
    backend: SandboxBackend
    limits: SandboxLimits
    command_timeout_s: float
    rounds: int

    async def run(
        self,
        command: Command,
        *,
        base: Snapshot | None = None,
        variables: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> ExecResult:
        """One run of a command in a sandbox of its own, on the repository's files or on others.

        Raises:
            SandboxError: the sandbox failed.
        """
        async with started(
            self.backend, self.repository.files if files is None else files, self.limits, base
        ) as sandbox:
            return await sandbox.exec(["sh", "-c", command.command], env=variables, timeout_s=self.command_timeout_s)

    async def on_bare_machine(self, command: Command) -> str:
        """Why a command says nothing about an environment: it works without one, or never the same way.

        Raises:
            SandboxError: the sandbox failed.
        """
        runs = [await self.run(command) for _ in range(2)]
        if not any(command.missing(result) for result in runs):
            return "it gives its expected output on the bare machine already"
        if runs[0].exit_code != runs[1].exit_code or command.missing(runs[0]) != command.missing(runs[1]):
            return "it is not deterministic: two runs on the bare machine ended differently"
        return ""

    async def look(
        self, sandbox: Sandbox, before: Inventory, declared: Declared, commands: Sequence[Command]
    ) -> list[str]:
        """What on a machine is not as it has to be (guards.py).

        Raises:
            SandboxError: the sandbox failed.
        """
        names = [name for command in commands for name in programs(command.command)]
        try:
            after = await take_inventory(sandbox)
        except OSError as error:
            return [f"the machine cannot be looked at: {error.strerror}. Remove what is not needed"]
        machine = Machine(
            sandbox.workdir,
            before,
            after,
            await resolve(sandbox, names, declared.variables),
            {path: sha256(content).hexdigest() for path, content in self.repository.files.items()},
            {path: len(content) for path, content in self.repository.files.items()},
        )
        found = guards.faults(machine, declared, commands)
        lines, paths = guards.telling_lines(commands), guards.telling_files(machine)
        if lines and paths:
            patterns = [word for line in lines for word in ("-e", line)]
            stdin = b"".join(path.encode(errors="surrogateescape") + b"\0" for path in paths)
            grepped = await sandbox.exec(["sh", "-c", _GREP, "sh", *patterns], stdin=stdin, env=_SYSTEM_PATH)
            held = set(paths) & set(grepped.output.decode(errors="surrogateescape").splitlines())
            if held:
                found.append(f"these hold expected output word for word, and must not: {', '.join(sorted(held)[:5])}")
        return found

    async def put_back(self, sandbox: Sandbox) -> None:
        """Make the repository's files in a sandbox what they were.

        Raises:
            SandboxError: the sandbox failed.
        """
        for path, content in self.repository.files.items():
            try:
                if await sandbox.read(path, len(content) + 1) == content:
                    continue
            except OSError:
                await sandbox.exec(["/bin/rm", "-rf", "--", path])
            try:
                await sandbox.write(path, content)
            except OSError:
                # Something else than a folder is in the way.
                top = path.partition("/")[0]
                await sandbox.exec(["/bin/rm", "-rf", "--", top])
                await sandbox.write(path, content)

    async def without_repository(self, sandbox: Sandbox) -> Snapshot:
        """The machine without the repository's files and without caches of them. The sandbox is of no use after it.

        Raises:
            OSError: there is no room for another snapshot.
            SandboxError: the sandbox failed.
        """
        paths = "".join(f"{path}\0" for path in self.repository.files).encode(errors="surrogateescape")
        await sandbox.exec(["xargs", "-0", "rm", "-f", "--"], stdin=paths, env=_SYSTEM_PATH)
        names = [word for name in _CACHES for word in ("-o", "-name", name)][1:]
        find = ["find", ".", "(", *names, ")", "-prune", "-exec", "rm", "-rf", "--", "{}", "+"]
        await sandbox.exec(find, env=_SYSTEM_PATH)
        return await sandbox.snapshot()

    async def differences(
        self, base: Snapshot, variables: Mapping[str, str], commands: Sequence[Command]
    ) -> dict[str, str]:
        """What the output of each command lacks on a machine; a command that has all of it is not in there.

        Raises:
            SandboxError: a sandbox failed.
        """
        found: dict[str, str] = {}
        garbled = dict.fromkeys(self.repository.files, GARBLED)
        for command in commands:
            for done in range(self.rounds):
                lack = command.difference(await self.run(command, base=base, variables=variables))
                if lack:
                    found[command.command] = f"it is not the same every time: {lack}" if done else lack
                    break
            else:
                control = await self.run(command, base=base, variables=variables, files=garbled)
                if not command.missing(control):
                    found[command.command] = (
                        "it prints what is expected also where all files of the repository hold garbage, so its "
                        "output does not come from them"
                    )
        return found


@asynccontextmanager
async def started(
    backend: SandboxBackend, files: Mapping[str, bytes], limits: SandboxLimits, base: Snapshot | None = None
) -> AsyncIterator[Sandbox]:
    """A fresh sandbox, stopped for certain at the end."""
    sandbox = await backend.start(files, limits, base=base)
    try:
        yield sandbox
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
