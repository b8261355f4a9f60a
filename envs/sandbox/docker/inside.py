"""What the backend has inside a container: two shells of its own, by which it kills, looks around, and moves files.

    control     root's, with no capability but CAP_KILL: the sandbox's user can neither end it nor look into it. It
                uses nothing but what is built into a shell, so it works where no process can be made any more.
    helper      the user's, for files

The user's programs can end the helper, or get in its way. They must gain nothing by it, least of all that a failure of
theirs looks like one of the machine: what does not work is tried again after everything of the user's was killed.
"""

from __future__ import annotations

import asyncio
import io
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import BinaryIO, Protocol, TypeVar

from composer.errors import SandboxError
from envs.sandbox.docker.container import UID
from envs.sandbox.docker.engine import Engine, EngineRefusal
from envs.sandbox.docker.shell import PersistentShell, ShellEndedError, loop
from envs.sandbox.docker.snapshots import BoundedFile

T = TypeVar("T")

USER, ROOT = f"{UID}:{UID}", "0:0"
ANSWER_S = 20.0
"""For a shell of ours to answer."""
ARCHIVE_S = 60.0
"""The same where it reads or writes many files."""
KILLED = 137
"""Exit code of what SIGKILL ended."""

_NUM_LOOKS = 100
_NO_FORK = re.compile(rb"[Cc]an(no|')t fork|fork: |Resource temporarily unavailable")
_FIRST = b"IFS= read -r n </proc/1/comm; printf '%s\\n' \"$n\"; "
_PROCESSES = b"printf '%s ' /proc/[0-9]*"
_KILL = b"""\
k=" $$ %b "; s=' '; n=1; i=0
while [ -n "$n" ] && [ "$i" -lt 100 ]; do
    n=; i=$((i + 1))
    for p in /proc/[0-9]*; do
        p=${p#/proc/}
        case "$k$s" in *" $p "*) ;; *) kill -STOP "$p"; s="$s$p "; n=1;; esac
    done
done
for p in $s; do kill -KILL "$p"; done
:"""
"""All are stopped before the first is killed: a process that is stopped does not fork."""


_NO_PROGRAM = (
    ("executable file not found", 127),
    ("no such file or directory", 127),
    ("permission denied", 126),
    ("exec format error", 126),
    ("is a directory", 126),
    ("not a directory", 126),
    ("argument list too long", 126),
)
"""What runc says (and the exit code that a shell would give)."""


class NotStartedError(Exception):
    """The engine says that a program cannot be run."""

    exit_code = 126


class _Sink(Protocol):
    def add(self, data: bytes) -> object: ...


class _Text:
    def __init__(self, most: int) -> None:
        self.data, self._most = bytearray(), most

    def add(self, data: bytes) -> None:
        self.data += data[: max(0, self._most - len(self.data))]


class Inside:
    """The backend's end of one container. One call at a time."""

    def __init__(self, id: str, name: str, engine: Engine, lifetime_s: float) -> None:
        """Nothing has started.

        Args:
            id: of the sandbox, for messages.
            name: of the container.
            engine: runs it.
            lifetime_s: after which it ends.
        """
        self.id, self.name, self.engine, self._lifetime_s = id, name, engine, lifetime_s
        self.reason = ""
        """Why the sandbox is gone."""
        self.has_bash = False
        self._own: set[int] = set()
        self._helper_number = 0
        self._dies_at = math.inf
        self._control: PersistentShell | None = None
        self._helper: PersistentShell | None = None

    def is_starting(self) -> None:
        """The container's lifetime begins."""
        self._dies_at = time.monotonic() + math.ceil(self._lifetime_s)

    async def begin(self, first_process: str) -> None:
        """Open the control shell, before anything else runs in the container.

        Args:
            first_process: what the first process calls itself when everything is there.

        Raises:
            SandboxError: the engine does not answer, or the container has ended.
        """
        for _ in range(_NUM_LOOKS):
            listed = await self.ask_control(_FIRST + _PROCESSES + b"; printf ' -%s' $$")
            first, _, rest = listed.partition(b"\n")
            *numbers, control = re.findall(rb"\d+", rest)
            self._own = {int(number) for number in numbers} - {int(control)}
            if first == first_process.encode():
                return
            await asyncio.sleep(0.02)
        raise await self.loss("its first process does not get ready")

    def close(self) -> None:
        """Hang up; whoever waits for an answer is woken."""
        for shell in (self._control, self._helper):
            if shell is not None:
                shell.stream.close()

    @property
    def num_own_processes(self) -> int:
        """Those that are no program of the sandbox's."""
        return len(self._own) + 1 + (self._helper is not None)

    def check(self) -> None:
        """Make sure that the sandbox has not gone, as far as is known.

        Raises:
            SandboxError: it has.
        """
        if not self.reason and time.monotonic() > self._dies_at:
            self.reason = self._too_old()
        if self.reason:
            raise self._gone()

    async def loss(self, what: str) -> SandboxError:
        """The error for a sandbox that does not do what it has to, after a look at why."""
        if not self.reason and time.monotonic() > self._dies_at - 0.5:
            self.reason = self._too_old()
        if not self.reason:
            why = await self._look(what)
            self.reason = self.reason or why
        return self._gone()

    async def _look(self, what: str) -> str:
        try:
            state = (await self.engine.call("look at a container", lambda client: client.inspect_container(self.name)))[
                "State"
            ]
        except EngineRefusal as e:
            return "its container has ended" if e.status == 404 else str(e)
        except SandboxError as e:
            return str(e)
        if state.get("Running"):
            return what
        return "its container has ended for want of memory" if state.get("OOMKilled") else "its container has ended"

    def _too_old(self) -> str:
        return f"its lifetime of {self._lifetime_s:g} s is over"

    def _gone(self) -> SandboxError:
        return SandboxError(f"sandbox {self.id} is gone: {self.reason}")

    async def open_shell(self, user: str, report: bool) -> PersistentShell:
        """Start a shell; `report` as of `shell.loop`.

        Raises:
            EngineRefusal: the engine did not start it.
            SandboxError: the engine does not answer.
        """
        is_bash = report and self.has_bash
        program = ["bash", "--noprofile", "--norc"] if is_bash else ["/bin/sh"]
        stream = await self.engine.open(
            self.name,
            [*program, "-c", loop(is_bash, report)],
            user=user,
            environment={} if report else {"LC_ALL": "C"},
        )

        async def is_running() -> bool:
            try:
                return (await self.engine.state_of(stream)).is_running
            except EngineRefusal:
                return False

        return PersistentShell(stream, is_running, report)

    async def persistently(self, start: Callable[[], Awaitable[T]]) -> T:
        """Have the engine start a program of the user's; if there is no room for it, make some.

        Raises:
            NotStartedError: there is no such program.
            SandboxError: the sandbox is gone or does not answer.
        """
        try:
            return await start()
        except EngineRefusal as e:
            _raise_if_no_program(e)
        # With as many processes as it may have, or with no memory left, nothing can be started in a container.
        await self.kill(set())
        try:
            return await start()
        except EngineRefusal as e:
            _raise_if_no_program(e)
            raise await self.loss(str(e)) from e

    async def ask_control(self, command: bytes) -> bytes:
        """Run something that is built into a shell as root, and return what it printed.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        for is_last in (False, True):
            text = _Text(2**20)
            try:
                if self._control is None:
                    self._control = await self.open_shell(ROOT, report=False)
                await self._control.run(command, text.add, time.monotonic() + min(ANSWER_S, self.engine.answer_s))
                return bytes(text.data)
            except (ShellEndedError, TimeoutError, EngineRefusal) as e:
                if self._control is not None:
                    self._control.stream.close()
                    self._control = None
                if is_last or isinstance(e, TimeoutError) or self.reason:
                    raise await self.loss("its control shell does not answer") from e
        raise AssertionError("the second attempt ends in one way or another")

    async def processes(self) -> set[int]:
        """The numbers of all processes in the container.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        return {int(number) for number in re.findall(rb"\d+", await self.ask_control(_PROCESSES))}

    async def kill(self, keep: set[int]) -> None:
        """Kill every process of the sandbox's user that is not in `keep`, also while it multiplies.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        spared = " ".join(str(number) for number in sorted(keep | self._own))
        await self.ask_control(_KILL % spared.encode())

    async def ask(
        self,
        command: bytes,
        payload: tuple[BinaryIO, int] | None = None,
        timeout_s: float = ANSWER_S,
        most: int = 2**16,
    ) -> tuple[int, bytes]:
        """Run a command of ours as the user.

        Args:
            command: the command line.
            payload: a file that can be read anew, and how many bytes of it the command takes.
            timeout_s: wall time.
            most: bytes of its output to keep.

        Returns:
            Exit code and output.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """

        def sink() -> _Text:
            return _Text(most)

        code, text = await self._ask(command, sink, payload, timeout_s, lambda text: bytes(text.data[-500:]))
        return code, bytes(text.data)

    async def ask_root(self, command: bytes, payload: bytes) -> tuple[int, bytes]:
        """Run a command of ours as root, before anything of the user's runs; it takes all of the payload.

        Returns:
            Exit code and output.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        text = _Text(2**16)
        shell = await self.open_shell(ROOT, report=False)
        try:
            taken = (io.BytesIO(payload), len(payload))
            ended = await shell.run(command, text.add, time.monotonic() + ARCHIVE_S, taken)
        except (ShellEndedError, TimeoutError) as e:
            raise await self.loss("its root's shell does not answer") from e
        finally:
            shell.stream.close()
        return ended.exit_code, bytes(text.data)

    async def pack(self, command: bytes, file: BinaryIO, most: int) -> int:
        """Run a command of ours as the user and write its output to a file; returns its exit code.

        Raises:
            TooMuchError: it printed more than `most` bytes.
            OSError: the file cannot be written; ENOSPC: the disk is full.
            SandboxError: the sandbox is gone or does not answer.
        """

        def sink() -> BoundedFile:
            file.seek(0)
            file.truncate()
            return BoundedFile(file, most)

        before = await self.processes()
        try:
            code, _ = await self._ask(command, sink, None, ARCHIVE_S, lambda _: b"")
        except OSError:
            # What prints it is still at it.
            self._drop_helper()
            await self.kill(before)
            raise
        return code

    async def _ask(
        self,
        command: bytes,
        new_sink: Callable[[], _SinkT],
        payload: tuple[BinaryIO, int] | None,
        timeout_s: float,
        last_words: Callable[[_SinkT], bytes],
    ) -> tuple[int, _SinkT]:
        # A helper that was ended between calls is just replaced; then whoever ends it is killed first.
        for attempt in range(3):
            sink = new_sink()
            if payload is not None:
                payload[0].seek(0)
            try:
                if self._helper is None:
                    self._helper = await self.persistently(lambda: self.open_shell(USER, report=False))
                    number = _Text(64)
                    await self._helper.run(b"echo $$", number.add, time.monotonic() + ANSWER_S)
                    self._helper_number = int((re.findall(rb"\d+", bytes(number.data)) or [b"0"])[0])
                else:
                    # The user's own processes may have stopped it: `kill -STOP -1`.
                    await self.ask_control(b"kill -CONT %d 2>/dev/null; :" % self._helper_number)
                ended = await self._helper.run(command, sink.add, time.monotonic() + timeout_s, payload)
            except (ShellEndedError, TimeoutError) as e:
                self._drop_helper()
                if self.reason:
                    break
                if attempt or isinstance(e, TimeoutError):
                    await self.kill(set())
                continue
            except NotStartedError as e:
                raise await self.loss(f"its shell cannot be run: {e}") from e
            if ended.exit_code == KILLED or (ended.exit_code and _NO_FORK.search(last_words(sink))):
                self._drop_helper()
                await self.kill(set())
                continue
            return ended.exit_code, sink
        raise await self.loss("its files cannot be reached")

    def _drop_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.stream.close()


_SinkT = TypeVar("_SinkT", bound=_Sink)


def no_program(said: str) -> NotStartedError | None:
    """The error for what the engine says of a program that is not there, or cannot be run; None if it says else."""
    for words, code in _NO_PROGRAM:
        if words in said.lower():
            error = NotStartedError(words)
            error.exit_code = code
            return error
    return None


def _raise_if_no_program(refusal: EngineRefusal) -> None:
    if (error := no_program(refusal.said)) is not None:
        raise error from refusal
