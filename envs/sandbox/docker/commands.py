"""The commands of the model and of graders in one container, and what is done when something of theirs is in the way.

Two ways lead in: the persistent shell, and single programs. What the sandbox's user runs can fill the process table,
use up the memory, or kill what it may kill; so what cannot be started is tried once more after everything of the user's
was killed, and a program that was killed is told from a sandbox that has gone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from socket import socket

from composer.contract import ExecResult, SandboxLimits
from envs.sandbox.docker.engine import Engine, EngineRefusal
from envs.sandbox.docker.execution import Execution
from envs.sandbox.docker.inside import ANSWER_S, KILLED, USER, Inside, NotStartedError, no_program
from envs.sandbox.docker.shell import Ended, PersistentShell, ShellEndedError, quoted
from envs.sandbox.programs import TIMED_OUT, OutputBuffer

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHERE = b"if [ %(said)b -ef %(link)b ]; then printf %%s %(said)b; else readlink -n %(link)b; fi"
"""As the last command named the directory, which may be by a symbolic link, unless it was moved or removed."""
_KILLED_S = 5.0
"""For what was killed to have ended."""


class Commands:
    """Runs commands in one container, one at a time."""

    def __init__(self, inside: Inside, engine: Engine, limits: SandboxLimits, workdir: str) -> None:
        """Nothing is started.

        Args:
            inside: the container.
            engine: runs it.
            limits: of the sandbox.
            workdir: where commands start.
        """
        self._inside, self._engine, self._limits, self._workdir = inside, engine, limits, workdir
        self._shell: PersistentShell | None = None
        self._directory = os.fsencode(workdir)

    def close(self) -> None:
        """Hang up; whoever waits for an answer is woken."""
        if self._shell is not None:
            self._shell.stream.close()

    async def in_shell(self, command: bytes, timeout_s: float | None) -> ExecResult:
        """Run a command line in the persistent shell; see `DockerSandbox.shell`.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        shell = await self._usable_shell()
        began = time.monotonic()
        deadline = began + (self._limits.exec_timeout_s if timeout_s is None else timeout_s)
        output = OutputBuffer(self._limits.output_bytes)
        timed_out = False
        try:
            ended = await shell.run(command, output.add, deadline)
        except TimeoutError:
            timed_out = True
            ended = await self._end_shell(shell, output, True)
        except ShellEndedError:
            ended = await self._end_shell(shell, output, False)
        self._directory = ended.directory
        return ExecResult(ended.exit_code, output.value(), timed_out, output.truncated, time.monotonic() - began)

    async def directory(self) -> bytes:
        """Where the persistent shell is, or would begin; see `DockerSandbox.directory`.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        if self._shell is None or not self._shell.processes:
            return self._directory
        where = _WHERE % {b"said": quoted(self._directory), b"link": b"/proc/%d/cwd" % self._shell.processes[0]}
        code, found = await self._inside.ask(where)
        return self._directory if code or not found else found

    async def enter(self, directory: bytes) -> bool:
        """Have a shell that has not begun yet begin there; whether there is such a directory.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        code, _ = await self._inside.ask(b"[ -d %b ]" % quoted(directory))
        if code == 0 and self._shell is None:
            self._directory = directory
        return code == 0

    async def _usable_shell(self) -> PersistentShell:
        if self._shell is not None and not await self._shell.is_usable():
            self._shell.stream.close()
            self._shell = None
        if self._shell is not None:
            return self._shell
        # The engine cannot start it there: the directory may be gone, and its name be no text.
        where = b"cd -- %b || cd -- %b" % (quoted(self._directory), quoted(self._workdir))
        for _ in range(2):
            shell = await self._inside.persistently(lambda: self._inside.open_shell(USER, report=True))
            try:
                await shell.run(where, len, time.monotonic() + ANSWER_S)
            except (ShellEndedError, TimeoutError):
                shell.stream.close()
                await self._inside.kill(set())  # what may have been in its way
            else:
                self._shell = shell
                return shell
        raise await self._inside.loss("its shell does not start")

    async def _end_shell(self, shell: PersistentShell, output: OutputBuffer, is_late: bool) -> Ended:
        """Collect a shell that has ended, or has to. Its successor starts in the directory of the last command."""
        self._shell = None
        running = Execution(self._engine, shell.stream, output, 0.0)
        # What earlier commands left running stays, as after Ctrl-C in a terminal.
        earlier = set(shell.processes[1:]) - set(shell.processes[:1])
        if is_late:
            await self._inside.kill(earlier)
        code = await self._end_of(running)
        if code is None:
            await self._inside.kill(earlier)
            code = await self._end_of(running)
        await running.last_words()
        shell.stream.close()
        if code is None:
            raise await self._inside.loss("a shell of it would not end")
        if code == KILLED:
            await self._inside.ask_control(b":")  # or the kernel has killed it with everything else
        return Ended(TIMED_OUT if is_late else code, self._directory)

    async def run(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_s: float | None, channel: socket | None
    ) -> ExecResult:
        """Run one program; see `DockerSandbox.exec`.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        began = time.monotonic()
        output = OutputBuffer(self._limits.output_bytes)
        for _ in range(2):
            before = await self._inside.processes()
            deadline = time.monotonic() + (self._limits.exec_timeout_s if timeout_s is None else timeout_s)
            output = OutputBuffer(self._limits.output_bytes)
            try:
                stream = await self._inside.persistently(
                    lambda: self._engine.open(
                        self._inside.name,
                        argv if channel is not None else _with_one_output(argv, env),
                        user=USER,
                        stdin=bool(stdin) or channel is not None,
                        environment=env,
                        workdir=self._workdir,
                    )
                )
                program = Execution(self._engine, stream, output, deadline)
                try:
                    code = await self._run(program, argv[0], stdin, channel, before)
                finally:
                    stream.close()
                if not program.never_started:
                    timed_out = code is None
                    seconds = time.monotonic() - began
                    return ExecResult(
                        TIMED_OUT if code is None else code, output.value(), timed_out, output.truncated, seconds
                    )
                if (error := no_program(output.value().decode(errors="replace"))) is not None:
                    raise error
            except NotStartedError as e:
                return ExecResult(e.exit_code, f"{argv[0]}: {e}\n".encode(), seconds=time.monotonic() - began)
            # There was no room for it: too many processes, or no memory left.
            await self._inside.kill(set())
            if channel is not None:
                break  # of which something may have been read already
        raise await self._inside.loss(f"{argv[0]!r} could not be started: {shown(output.value())}")

    async def _run(
        self, program: Execution, name: str, stdin: bytes, channel: socket | None, before: set[int]
    ) -> int | None:
        try:
            code = await program.run(stdin, channel)
            if code is None:
                await self._inside.kill(before)
                if await self._end_of(program) is None:
                    raise await self._inside.loss(f"{name!r} would not end")
                await program.last_words()
            elif code == KILLED:
                await self._inside.ask_control(b":")  # or the kernel has killed it with everything else
        except EngineRefusal as e:
            raise await self._inside.loss(str(e)) from e
        return code

    async def _end_of(self, program: Execution) -> int | None:
        try:
            return await program.end(time.monotonic() + _KILLED_S)
        except EngineRefusal as e:
            raise await self._inside.loss(str(e)) from e


def _with_one_output(argv: Sequence[str], env: Mapping[str, str]) -> Sequence[str]:
    """The same program with one stream for both of its outputs.

    The engine passes two on side by side, and their order is lost. The shell becomes the program, and says why where it
    cannot (127, 126). Some shells drop variables that they could not name themselves, so these come after it.
    """
    if argv[0].startswith("-") or "=" in argv[0]:
        return argv  # to a shell an option, to `env` a variable
    odd = [f"{name}={value}" for name, value in env.items() if not _NAME.fullmatch(name)]
    return ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *(["env", *odd] if odd else ()), *argv)


def shown(output: bytes) -> str:
    """The end of an output in one line, for messages."""
    return " ".join(output[-300:].decode(errors="replace").split())
