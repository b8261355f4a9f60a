r"""A shell in a container that runs one command line after the other, over one stream.

A `docker exec` costs about 100 ms, a command in an open shell a hundredth of that. What the shell reads:

    <number of lines>\n<the command line>\n[<payload>]      then, when it has said that the command has ended,
    <nonce>\n

It answers on the program's standard error, which no command has: the processes that exist (if it is to `report`), a
line; a comma when it has read the payload; when the command has ended, one dot. Only then does the nonce exist: 128
random bits, which the shell prints to its standard output behind what the command printed, with the exit code and the
directory. So nothing that a command prints can be taken for its end, and all of its output has arrived when the nonce
has: the two streams take different ways through the engine.

(A program of the same user can still write to the shell's own standard error, by way of /proc, and so have the nonce
sent early, read it there, and fool its own shell. It gains nothing: verdicts come from `exec`, whose codes are the
kernel's.)

It is written for any POSIX shell: dash and busybox know no descriptors above 9, and read single lines only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO

from envs.sandbox.docker.stream import STDERR, ExecStream

PAYLOAD_BLOCK = 2**16
"""A payload is filled up to a multiple of these bytes, which `TAKE_PAYLOAD` reads."""
_FREE_READS = 2**22
"""Bytes of one command's output that are read at full speed. Endless writers then wait for the reader."""
_FIRST_QUIET_S, _LAST_QUIET_S = 0.1, 2.0
_MOST_STATUS = 2**16
"""Bytes behind a nonce, and of a report: a directory's name, the numbers of processes."""
_MOST_PIECES = 64
_NUMBER = re.compile(rb"\d+")

# With `command`, a mistake in a command line does not end the shell. In busybox one in a subshell would then hang it.
_LOOP = """
exec {output}>&1 {commands}<&0 {status}>&2 </dev/null >/dev/null 2>&1
{prelude}
__b=$(readlink /proc/$$/exe)
while IFS= read -r __n <&{commands}; do
    __c=
    while [ "$__n" -gt 0 ]; do
        IFS= read -r __l <&{commands} || exit
        __c="$__c$__l
"
        __n=$((__n - 1))
    done
    {report}
    case $__b in
    *busybox*) eval "$__c" </dev/null >&{output} 2>&{output} {close};;
    *) command eval "$__c" </dev/null >&{output} 2>&{output} {close};;
    esac
    __s=$?
    printf . >&{status}
    IFS= read -r __n <&{commands} || exit
    printf '%s%s %s\\0' "$__n" "$__s" "$PWD" >&{output}
done
"""
# When memory runs out, the kernel is to take the model's programs and not what holds the container together.
_EXPENDABLE = "echo 500 >/proc/self/oom_score_adj"
_REPORT = "printf '%s ' $$ /proc/[0-9]* >&{status}; printf '\\n' >&{status}"


class ShellEndedError(Exception):
    """The shell ended, or became another program, before the end of the command was seen."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    directory: bytes
    """Where the shell is afterwards."""


def loop(is_bash: bool, report: bool = True) -> str:
    """The shell's program.

    Args:
        is_bash: whether bash runs it; otherwise any shell can.
        report: whether commands come from the model: their processes are reported, and the shell's own descriptors are
            closed to them. Otherwise commands are ours, and may read a payload (`take_payload`).
    """
    output, commands, status = (197, 198, 199) if is_bash else (7, 8, 9)
    return _LOOP.format(
        output=output,
        commands=commands,
        status=status,
        close=f"{output}>&- {commands}<&- {status}>&-" if report else "",
        prelude=_EXPENDABLE if report else ":",
        report=_REPORT.format(status=status) if report else ":",
    )


def take_payload(num_bytes: int) -> str:
    """A command that writes the payload of `num_bytes`, and what fills it up, to its standard output.

    It says when it has, or the next thing to be read would be the payload's rest.
    """
    return (
        f"{{ dd bs={PAYLOAD_BLOCK} count={_num_blocks(num_bytes)} iflag=fullblock <&8 2>/dev/null && printf , >&9; }}"
    )


def _num_blocks(num_bytes: int) -> int:
    """At least one: busybox takes a count of 0 for no count."""
    return max(1, -(-num_bytes // PAYLOAD_BLOCK))


def quoted(text: str | bytes) -> bytes:
    """A word of a command line that is this text, whatever is in it."""
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return b"'" + data.replace(b"'", b"'\\''") + b"'"


class PersistentShell:
    """One shell, from its first command to its end."""

    def __init__(self, stream: ExecStream, is_running: Callable[[], Awaitable[bool]], report: bool = True) -> None:
        """Take over a stream of a program that runs `loop`.

        Args:
            stream: its streams.
            is_running: asked now and then while nothing comes: what a shell leaves running can keep its streams open.
            report: as of `loop`.
        """
        self.stream = stream
        self._is_running, self._report = is_running, report
        self._early = b""
        self.processes: list[int] = []
        """Reported before the last command, the shell's own number first."""

    async def is_usable(self) -> bool:
        """Take what was printed since the last command, and see whether the shell is still there."""
        for _ in range(_MOST_PIECES):  # something may be writing without an end
            if (piece := await self.stream.receive(0.0)) is None:
                break
            if piece[0] != STDERR:
                self._early = (self._early + piece[1])[-_MOST_STATUS:]
        return not self.stream.ended

    async def run(
        self,
        command: bytes,
        add: Callable[[bytes], object],
        deadline: float,
        payload: tuple[BinaryIO, int] | None = None,
    ) -> Ended:
        """Run a command line.

        Args:
            command: any text without NUL.
            add: takes the output piece by piece, also that of a command that does not end.
            deadline: by `time.monotonic`.
            payload: a file, and how many bytes of it `take_payload` gets.

        Raises:
            ShellEndedError: the shell did.
            TimeoutError: the command has not ended at the deadline. The shell can be used for nothing more.
        """
        run = _Run(self._early, add)
        self._early, self.processes = b"", []
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self.stream.send(b"%d\n%s\n" % (command.count(b"\n") + 1, command))
        except OSError as e:
            if isinstance(e, TimeoutError):
                raise
            raise ShellEndedError from e
        try:
            if payload is None:
                return await self._answer(run, deadline, False)
            sending = asyncio.ensure_future(self._send(*payload))
            try:
                return await self._answer(run, deadline, True)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
        finally:
            self._early, self.processes = run.rest, run.processes

    async def _answer(self, run: _Run, deadline: float, has_payload: bool) -> Ended:
        quiet_s = _FIRST_QUIET_S
        while run.ended is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            piece = await self.stream.receive(min(left, quiet_s))
            if piece is None:
                if self.stream.ended or (quiet_s < left and not await self._is_running()):
                    raise ShellEndedError
                quiet_s = min(2 * quiet_s, _LAST_QUIET_S)
                continue
            stream, data = piece
            if stream != STDERR:
                run.take_output(data)
                if run.num_bytes > _FREE_READS:
                    await asyncio.sleep(0.001)
            elif run.take_status(data, self._report):
                if has_payload and not run.took_payload:
                    raise ShellEndedError
                try:
                    await self.stream.send(run.nonce + b"\n")
                except OSError as e:
                    raise ShellEndedError from e
        return run.ended

    async def _send(self, file: BinaryIO, num_bytes: int) -> None:
        left = _num_blocks(num_bytes) * PAYLOAD_BLOCK
        with contextlib.suppress(OSError):  # the end of the stream is seen where it is read
            while left:
                data = file.read(min(left, 2**20)) or bytes(left)
                await self.stream.send(data)
                left -= len(data)


class _Run:
    """What has arrived of one command's answer."""

    def __init__(self, early: bytes, add: Callable[[bytes], object]) -> None:
        self._add = add
        self.num_bytes = len(early)
        if early:
            add(early)
        self.nonce = b""
        self.processes: list[int] = []
        self.took_payload = False
        self.ended: Ended | None = None
        self.rest = b""
        self._status = b""
        self._held = b""
        self._is_behind_nonce = False

    def take_status(self, data: bytes, report: bool) -> bool:
        """Look at what the shell says of itself; true when it waits for the nonce, which now exists."""
        if self.nonce:
            return False
        self._status += data
        processes, line, dots = self._status.partition(b"\n") if report else (b"", b"\n", self._status)
        if not line:
            if len(self._status) > _MOST_STATUS:
                raise ShellEndedError
            return False
        self.processes = [int(number) for number in _NUMBER.findall(processes)]
        self.took_payload = b"," in dots
        if b"." not in dots:
            return False
        self.nonce = secrets.token_hex(16).encode()
        return True

    def take_output(self, data: bytes) -> None:
        """Pass output on, up to the nonce."""
        self.num_bytes += len(data)
        if not self.nonce:
            self._add(data)
            return
        self._held += data
        if not self._is_behind_nonce:
            at = self._held.find(self.nonce)
            before = len(self._held) - len(self.nonce) + 1 if at < 0 else at
            if before > 0:
                self._add(self._held[:before])
                self._held = self._held[before:]
            if at < 0:
                return
            self._is_behind_nonce = True
            self._held = self._held[len(self.nonce) :]
        end, found, rest = self._held.partition(b"\0")
        code, _, directory = end.partition(b" ")
        if found and code.isdigit():
            self.ended, self.rest = Ended(int(code), directory), rest
        elif found or len(self._held) > _MOST_STATUS:
            raise ShellEndedError
