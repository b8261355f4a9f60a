"""One program in a container, from its start to its end: its streams, its exit code as the engine knows it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator
from socket import socket

from composer.errors import SandboxError
from envs.sandbox.docker.engine import Engine, ProgramState
from envs.sandbox.docker.stream import STDOUT, ExecStream
from envs.sandbox.programs import OutputBuffer

_CHUNK = 2**16
_FREE_READS = 2**22
"""Bytes of output that are read at full speed. Endless writers then wait for the reader."""
_FIRST_QUIET_S, _LAST_QUIET_S = 0.1, 1.0
_LAST_WORDS_S = 0.5
"""For what is still on its way when a program has ended whose streams others hold open."""


class Execution:
    """A program that the engine has started."""

    def __init__(self, engine: Engine, stream: ExecStream, output: OutputBuffer, deadline: float) -> None:
        """Take over its streams.

        Args:
            engine: knows whether it runs.
            stream: closed by `close`.
            output: takes what it writes.
            deadline: by `time.monotonic`.
        """
        self._engine, self._stream, self._output, self._deadline = engine, stream, output, deadline
        self.never_started = False
        """The engine could not run it, and has said why in its output."""

    async def run(self, stdin: bytes, channel: socket | None) -> int | None:
        """Serve the streams until the program ends.

        Args:
            stdin: what it can read.
            channel: takes the place of `stdin`, and of its standard output; it does not block.

        Returns:
            Its exit code; None: it has not ended at the deadline.

        Raises:
            SandboxError: the engine does not know the program any more, or does not answer.
        """
        async with self._feeding(stdin, channel):
            quiet_s = _FIRST_QUIET_S
            while (left := self._deadline - time.monotonic()) > 0 and not self._stream.ended:
                piece = await self._stream.receive(min(left, quiet_s))
                if piece is not None:
                    if not await self._take(piece, channel, left):
                        return None
                elif not self._stream.ended and quiet_s < left:
                    state = await self._engine.state_of(self._stream)
                    if not state.is_running:
                        await self._drain(channel)
                        return self._exit_code(state)
                    quiet_s = min(2 * quiet_s, _LAST_QUIET_S)
            # A program may close its streams and go on.
            return await self.end(self._deadline)

    async def end(self, deadline: float) -> int | None:
        """Wait until the program has ended; None if it has not at the deadline.

        Raises:
            SandboxError: the engine does not know the program any more, or does not answer.
        """
        pause_s = 0.002
        while True:
            state = await self._engine.state_of(self._stream)
            if not state.is_running:
                return self._exit_code(state)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, 0.25)

    async def last_words(self) -> None:
        """Take what a program that was killed had written."""
        await self._drain(None)

    async def _drain(self, channel: socket | None) -> None:
        end = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < end and (piece := await self._stream.receive(0.05)) is not None:
            await self._take(piece, channel, _LAST_WORDS_S)

    async def _take(self, piece: tuple[int, bytes], channel: socket | None, left_s: float) -> bool:
        """Pass a piece of output on; false if the channel did not take it in time."""
        stream, data = piece
        if channel is None or stream != STDOUT:
            self._output.add(data)
            if self._output.num_bytes > _FREE_READS:
                await asyncio.sleep(0.001)
            return True
        try:
            async with asyncio.timeout(left_s):
                await asyncio.get_running_loop().sock_sendall(channel, data)
        except TimeoutError:
            return False
        except OSError:
            pass  # whoever was to read it has hung up
        return True

    @contextlib.asynccontextmanager
    async def _feeding(self, stdin: bytes, channel: socket | None) -> AsyncIterator[None]:
        if channel is None and not stdin:
            yield
            return
        task = asyncio.ensure_future(self._feed(stdin, channel))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _feed(self, stdin: bytes, channel: socket | None) -> None:
        with contextlib.suppress(OSError):
            if channel is None:
                await self._stream.send(stdin)
            else:
                while data := await asyncio.get_running_loop().sock_recv(channel, _CHUNK):
                    await self._stream.send(data)
        self._stream.end_input()

    def _exit_code(self, state: ProgramState) -> int:
        self.never_started = state.has_no_number
        if state.exit_code is None and not self.never_started:
            raise SandboxError("the Docker engine does not know how a program ended")
        return state.exit_code or 0


def unsayable(words: list[str]) -> str:
    """Why the engine cannot be told to run this; "" if it can be."""
    try:
        sizes = [len(word.encode()) for word in words]
    except UnicodeEncodeError:
        return os.strerror(errno.EINVAL)
    if not words or any("\0" in word for word in words):
        return os.strerror(errno.EINVAL)
    # The kernel's own bound of a word, and what an engine is known to bear in all.
    return os.strerror(errno.E2BIG) if max(sizes) >= 2**17 or sum(sizes) > 2**20 else ""
