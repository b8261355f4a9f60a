"""The outer end of the relay: connections that an agent makes in its sandbox become connections to the gateway.

Whatever comes over the channel is the agent's doing: it can end the relay, or speak in its place. So it is limited in
size and number, reaches nothing but the gateway's port, and trouble with it ends the relaying and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from importlib.resources import files

from composer.gateway.relay import CHUNK, HEADER

RELAY = files("composer.gateway").joinpath("relay.py").read_text(encoding="utf-8")
"""What the sandbox's Python is told to run."""
MAX_CONNECTIONS = 64
"""Of one episode at a time; more are closed at once."""
_MAX_FRAME = 2**20


class Channel:
    """Carries until the relay ends, or `close`."""

    def __init__(self, port: int) -> None:
        """`port` is the gateway's."""
        self._port = port
        self._connections: dict[int, tuple[asyncio.StreamWriter, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self.exit_code: int | None = None
        """The agent's, when the relay has told it."""

    async def carry(self, sock: socket.socket) -> None:
        """Serve the relay at the other end of `sock`, which is closed afterwards."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            while True:
                kind, number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
                if length > _MAX_FRAME:
                    return
                payload = await reader.readexactly(length)
                if kind == b"O":
                    await self._open(number)
                elif kind == b"D":
                    await self._pass_on(number, payload)
                elif kind == b"C":
                    self._close(number)
                elif kind == b"X":
                    with contextlib.suppress(ValueError):
                        self.exit_code = int(payload)
                    return
                else:
                    return
        except (OSError, EOFError, asyncio.IncompleteReadError):
            return
        finally:
            for number in list(self._connections):
                self._close(number)
            self._writer.close()

    async def _open(self, number: int) -> None:
        if len(self._connections) >= MAX_CONNECTIONS or number in self._connections:
            await self._send(b"C", number)
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections[number] = writer, asyncio.create_task(self._answer(number, reader))

    async def _pass_on(self, number: int, payload: bytes) -> None:
        if number in self._connections:
            writer, _ = self._connections[number]
            try:
                writer.write(payload)
                await writer.drain()
            except OSError:
                self._close(number)

    async def _answer(self, number: int, reader: asyncio.StreamReader) -> None:
        """Send what the gateway says on a connection."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._send(b"D", number, data)
            await self._send(b"C", number)
            if number in self._connections:
                self._connections.pop(number)[0].close()

    def _close(self, number: int) -> None:
        if number in self._connections:
            writer, task = self._connections.pop(number)
            task.cancel()
            # At once, so that the gateway gives up what was asked.
            writer.transport.abort()

    async def _send(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        assert self._writer is not None
        async with self._sending:
            self._writer.write(HEADER.pack(kind, number, len(payload)) + payload)
            await self._writer.drain()
