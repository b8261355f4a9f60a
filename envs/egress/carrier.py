"""Connections over one stream: how those of a sandbox get out of a container, to which nothing but a stream leads.

Both ends are alike (relay.py in the sandbox's network, carried.py in the proxy). A frame is a kind, a number and a
length (`HEADER`), and data. Each direction of a connection may have `WINDOW` bytes under way that the other end has not
passed on yet, so one that nobody reads holds up no other. The reader of the stream never waits for anything else.

Standard library alone: it runs on the Pythons of the proxy and of the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

HEADER = struct.Struct("!BIH")
OPEN, DATA, END, RESET, CREDIT, QUESTION, ANSWER = range(1, 8)
"""OPEN: address and port (`!4sH`); CREDIT: bytes passed on (`!I`); QUESTION, ANSWER: datagrams of DNS."""
WINDOW = 2**18
_CHUNK = 2**14
_LINGER = struct.pack("ii", 1, 0)
"""Closing then resets the connection."""


def reset(connection: socket.socket) -> None:
    """Have a program hear that its connection broke, and not that it ended. Raises nothing."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)


class Line:
    """One connection of a carrier; its socket is closed when both directions have ended, or it breaks."""

    def __init__(self, carrier: Carrier, number: int, connection: socket.socket) -> None:
        """Nothing moves before `run`; the socket does not block."""
        self._carrier, self.number, self._socket = carrier, number, connection
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_queued, self._credit = 0, WINDOW
        self._may_send = asyncio.Event()
        self.is_broken = False
        """Whoever is at the socket has failed: its end is no end but a break."""
        self._was_reset = False
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Pass on, both ways, until both have ended. Raises nothing but a cancellation that is not of `take`."""
        self._task = asyncio.current_task()
        try:
            if self._was_reset:
                raise ConnectionResetError
            async with asyncio.TaskGroup() as group:
                group.create_task(self._outward())
                group.create_task(self._inward())
        except* OSError:
            reset(self._socket)
            if not self._was_reset:
                with contextlib.suppress(OSError):
                    await self._carrier.send(RESET, self.number)
        except* asyncio.CancelledError:
            reset(self._socket)
            if not self._was_reset:
                raise
        finally:
            self._socket.close()
            self._carrier.lines.pop(self.number, None)

    def take(self, kind: int, payload: bytes) -> None:
        """What the other end has sent."""
        if kind == CREDIT:
            self._credit += struct.unpack("!I", payload)[0]
            self._may_send.set()
        elif kind == RESET or self._num_queued + len(payload) > WINDOW:
            self._was_reset = True
            if self._task is not None:
                self._task.cancel()
        else:
            self._num_queued += len(payload)
            self._inbox.put_nowait(b"" if kind == END else payload)

    async def _outward(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._credit <= 0:
                self._may_send.clear()
                await self._may_send.wait()
            data = await loop.sock_recv(self._socket, min(_CHUNK, self._credit))
            if not data and self.is_broken:
                raise ConnectionResetError
            self._credit -= len(data)
            await self._carrier.send(DATA if data else END, self.number, data)
            if not data:
                return

    async def _inward(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await self._inbox.get():
            await loop.sock_sendall(self._socket, data)
            self._num_queued -= len(data)
            await self._carrier.send(CREDIT, self.number, struct.pack("!I", len(data)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


class Carrier:
    """One end of the stream."""

    def __init__(
        self,
        receive: Callable[[], Awaitable[bytes]],
        send: Callable[[bytes], Awaitable[None]],
        on_frame: Callable[[int, int, bytes], None],
    ) -> None:
        """Of a stream.

        Args:
            receive: some bytes; none: it has ended.
            send: writes all of it.
            on_frame: told kind, number and data of what is for no line that is there.
        """
        self._receive, self._send, self._on_frame = receive, send, on_frame
        self._lock = asyncio.Lock()
        self.lines: dict[int, Line] = {}

    async def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Send a frame.

        Raises:
            OSError: the stream is gone.
        """
        async with self._lock:
            await self._send(HEADER.pack(kind, number, len(payload)) + payload)

    def line(self, number: int, connection: socket.socket) -> Line:
        """A connection that begins."""
        self.lines[number] = line = Line(self, number, connection)
        return line

    async def run(self) -> None:
        """Read the stream to its end, and with it the lines.

        Raises:
            OSError: it broke.
        """
        try:
            await self._read()
        finally:
            for line in list(self.lines.values()):
                line.take(RESET, b"")

    async def _read(self) -> None:
        buffer = bytearray()
        while data := await self._receive():
            buffer += data
            while len(buffer) >= HEADER.size:
                kind, number, length = HEADER.unpack_from(buffer)
                end = HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[HEADER.size : end])
                del buffer[:end]
                if kind in (DATA, END, RESET, CREDIT):
                    if line := self.lines.get(number):
                        line.take(kind, payload)
                else:
                    self._on_frame(kind, number, payload)
