"""The three streams of a program in a container, as the engine sends them: frames over one socket.

A frame is eight bytes, the first of which names the stream and the last four the length, and the data
(https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach).
What goes to the program is not framed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

STDOUT, STDERR = 1, 2
_CHUNK = 2**16
_HEADER = 8


class FrameReader:
    """Splits what arrives into pieces of streams. A frame need not be whole to be passed on.

    Example:
        >>> reader = FrameReader()
        >>> reader.feed(bytes([2, 0, 0, 0, 0, 0, 0, 3]) + b"ab")
        >>> reader.next(), reader.next()
        ((2, b'ab'), None)
        >>> reader.feed(b"cd")
        >>> reader.next()
        (2, b'c')
    """

    def __init__(self, data: bytes = b"") -> None:
        """`data` has arrived already."""
        self._data = bytearray(data)
        self._stream = self._left = 0

    def feed(self, data: bytes) -> None:
        """Take in what arrived."""
        self._data += data

    def next(self) -> tuple[int, bytes] | None:
        """The stream's number and a piece of it; None if more has to arrive first."""
        while not self._left:
            if len(self._data) < _HEADER:
                return None
            self._stream, self._left = self._data[0], int.from_bytes(self._data[4:_HEADER], "big")
            del self._data[:_HEADER]
        if not self._data:
            return None
        piece = bytes(self._data[: self._left])
        del self._data[: self._left]
        self._left -= len(piece)
        return self._stream, piece


class ExecStream:
    """The streams of one program. May be read and written at the same time, each by one task."""

    def __init__(self, id: str, connection: socket.socket, early: bytes = b"") -> None:
        """Take over a socket that does not block.

        Args:
            id: of the exec, by which the engine knows the program.
            connection: closed by `close`.
            early: what has been read from it already.
        """
        self.id = id
        self._socket = connection
        self._reader = FrameReader(early)
        self._num_waiting, self._is_closed = 0, False
        self.ended = False
        """The engine has hung up: all output has been read."""

    async def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """A piece of output with its stream's number; None if there is none within the time, or none any more."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (piece := self._reader.next()) is None and not self.ended:
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not await self._wait_until_readable(left):
                    return None
                continue
            except OSError:
                data = b""
            self.ended = not data
            self._reader.feed(data)
        return piece

    async def _wait_until_readable(self, timeout_s: float) -> bool:
        # Not `sock_recv`: cancelled at its deadline, it may lose what it has just read.
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        handle = loop.call_later(timeout_s, _settle, readable, False)
        with self._in_use():
            loop.add_reader(self._socket, _settle, readable, True)
            try:
                return await readable
            finally:
                handle.cancel()
                loop.remove_reader(self._socket)

    async def send(self, data: bytes | memoryview) -> None:
        """Write to the program's standard input.

        Raises:
            OSError: the connection is gone.
        """
        with self._in_use():
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def end_input(self) -> None:
        """The program reads no more than what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up. A program that goes on loses its streams."""
        self.ended = self._is_closed = True
        # Whoever waits is woken by the end of the stream, and closes the descriptor in leaving.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._num_waiting:
            self._socket.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._is_closed and not self._num_waiting:
                self._socket.close()


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
