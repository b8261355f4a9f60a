"""The proxy's end of a container's network: its connections come over one stream (carrier.py) in place of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable

from envs.egress import names
from envs.egress.carrier import ANSWER, OPEN, QUESTION, Carrier, Line
from envs.egress.forward import Forwarder, Settings

_CHUNK = 2**16
_DNS = 53
_ANSWERS_AT_A_TIME = 64


class Carried(Forwarder):
    """Serves one sandbox, as `forward.Gate` does."""

    def __init__(
        self, sandbox: str, fd: int, password: str, port: int, knows: Callable[[str], bool], settings: Settings
    ) -> None:
        """Start to serve; there is a running event loop.

        Args:
            sandbox: its name.
            fd: of the stream.
            password: of mitmproxy's port.
            port: mitmproxy's, on loopback.
            knows: whether a name has an address.
            settings: how much, and how long.
        """
        super().__init__(sandbox, password, port, knows, settings)
        self._stream = socket.socket(fileno=fd)
        self._stream.setblocking(False)
        loop = asyncio.get_running_loop()
        self._carrier = Carrier(
            lambda: loop.sock_recv(self._stream, _CHUNK), lambda data: loop.sock_sendall(self._stream, data), self._take
        )
        self._lines: dict[socket.socket, Line] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._reading = asyncio.create_task(self._read())
        self._closing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop serving: what is open is reset, and what comes is refused. Idempotent; raises nothing."""
        for task in (self._reading, *self._answering, *self._open):
            task.cancel()
        self._closing = self._closing or asyncio.create_task(self._close())

    async def _close(self) -> None:
        await asyncio.gather(self._reading, *self._answering, *self._open, return_exceptions=True)
        self._stream.close()

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            await self._carrier.run()

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == OPEN and number not in self._carrier.lines:
            address, port = struct.unpack("!4sH", payload)
            # The relay keeps to the number of connections by itself; the loopback of whoever does not is not read.
            ours, theirs = socket.socketpair()
            for each in (ours, theirs):
                each.setblocking(False)
            line = self._lines[ours] = self._carrier.line(number, theirs)
            self._keep(line.run())
            self._keep(self._serve_line(ours, str(ipaddress.IPv4Address(address)), port))
        elif kind == QUESTION and len(self._answering) < _ANSWERS_AT_A_TIME:
            response = names.answer(payload, self._knows)
            if response is not None:
                task = asyncio.create_task(self._send_answer(number, response))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _send_answer(self, number: int, response: bytes) -> None:
        with contextlib.suppress(OSError):
            await self._carrier.send(ANSWER, number, response)

    async def _serve_line(self, ours: socket.socket, address: str, port: int) -> None:
        async def serve(connection: socket.socket) -> None:
            if port == _DNS:
                await self._answer(connection)
            else:
                await self._forward(connection, address, port)

        try:
            async with self._slots:
                await self._serve(serve, ours)
        finally:
            ours.close()
            self._lines.pop(ours, None)

    def _break(self, connection: socket.socket) -> None:
        if line := self._lines.get(connection):
            line.is_broken = True
