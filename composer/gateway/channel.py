"""The outer end of the relay: connections that an agent makes in its sandbox become connections to the gateway.

Whatever comes over the channel is the agent's doing: it can end the relay, or speak in its place. So it is limited in
size and number, reaches nothing but the gateway's port, and trouble with it ends the relaying and nothing else. Trouble
on the way from here to the gateway is ours, and reported: an agent that lost its model by it has not stopped by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from importlib.resources import files

from composer.gateway.relay import CHUNK, HEADER, MAX_CONNECTIONS

RELAY = files("composer.gateway").joinpath("relay.py").read_text(encoding="utf-8")
"""What the sandbox's Python is told to run."""
_MAX_FRAME = 2**20
_HUNG_UP = (ConnectionError, asyncio.IncompleteReadError)
"""How an end of a connection between here and the gateway looks, which has closed it: on a request that is no HTTP."""


class Channel:
    """Carries until the relay ends, or `close`."""

    def __init__(self, port: int, report: Callable[[Exception], None]) -> None:
        """`port` is the gateway's; `report` is told what of ours broke."""
        self._port, self._report = port, report
        self._connections: dict[int, tuple[asyncio.StreamWriter, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self.exit_code: int | None = None
        """The agent's, when the relay has told it."""
        self.has_hung_up = False
        """Whether it was ended from here, on words that no relay says."""

    async def carry(self, sock: socket.socket) -> None:
        """Serve the relay at the other end of `sock`, which is closed afterwards."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            while True:
                kind, number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
                if length > _MAX_FRAME or kind not in (b"O", b"D", b"C", b"X"):
                    self.has_hung_up = True
                    return
                payload = await reader.readexactly(length)
                if kind == b"O":
                    await self._open(number)
                elif kind == b"D":
                    await self._pass_on(number, payload)
                elif kind == b"C":
                    self._close(number)
                else:
                    with contextlib.suppress(ValueError):
                        self.exit_code = int(payload)
                    return
        except (OSError, EOFError, asyncio.IncompleteReadError):  # the sandbox's end of it
            return
        except Exception as error:
            self._report(error)
        finally:
            for number in list(self._connections):
                self._close(number)
            self._writer.close()

    async def _open(self, number: int) -> None:
        if len(self._connections) >= MAX_CONNECTIONS or number in self._connections:
            await self._send(b"C", number)
            return
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            self._report(error)
            await self._send(b"C", number)
            return
        self._connections[number] = writer, asyncio.create_task(self._answer(number, reader))

    async def _pass_on(self, number: int, payload: bytes) -> None:
        if number not in self._connections:
            return
        writer, _ = self._connections[number]
        try:
            writer.write(payload)
            await writer.drain()
        except OSError as error:  # what the gateway has said before it hung up is still on its way
            if not isinstance(error, _HUNG_UP):
                self._report(error)

    async def _answer(self, number: int, reader: asyncio.StreamReader) -> None:
        """Send what the gateway says on a connection, to its end."""
        try:
            while data := await self._read(reader):
                await self._send(b"D", number, data)
            # Forgotten first: when the relay knows, it may open another in its place.
            if number in self._connections:
                self._connections.pop(number)[0].close()
            await self._send(b"C", number)
        except OSError:  # the sandbox's end of it
            return
        except Exception as error:
            self._report(error)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """What the gateway says next; nothing if it has hung up."""
        try:
            return await reader.read(CHUNK)
        except OSError as error:
            if not isinstance(error, _HUNG_UP):
                self._report(error)
            return b""

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
