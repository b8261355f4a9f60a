"""From a sandbox's listening sockets to mitmproxy: takes connections, says whose they are and where they were going.

Each accepted connection becomes one to mitmproxy's SOCKS5 port, with the sandbox as the user's name, a password that
only this process knows, and the address that the program had meant as the destination. Runs in the proxy's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from envs.egress import names
from envs.egress.carrier import reset

_CHUNK = 2**16
_QUESTIONS_AT_A_TIME = 64
_HANDSHAKE_S = 10.0


class Forwarder:
    """Takes connections of one sandbox on to mitmproxy."""

    def __init__(
        self, sandbox: str, password: str, port: int, knows: Callable[[str], bool], settings: Settings
    ) -> None:
        """Nothing is open.

        Args:
            sandbox: its name.
            password: of mitmproxy's port.
            port: mitmproxy's, on loopback.
            knows: whether a name has an address.
            settings: how much, and how long.
        """
        self.sandbox = sandbox
        self._password, self._port, self._knows, self._settings = password, port, knows, settings
        self._open: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.connections)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, serve: Callable[[socket.socket], Awaitable[None]], connection: socket.socket) -> None:
        try:
            await serve(connection)
        except (OSError, EOFError, TimeoutError):
            self._break(connection)
        except asyncio.CancelledError:
            self._break(connection)
            raise
        finally:
            connection.close()

    def _break(self, connection: socket.socket) -> None:
        """Have the program hear that its connection broke when it is closed next."""
        reset(connection)

    async def _answer(self, connection: socket.socket) -> None:
        """Questions over TCP: each with its length before it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._settings.timeout_s):
            while True:
                (length,) = struct.unpack("!H", await _exactly(connection, 2))
                response = names.answer(await _exactly(connection, length), self._knows)
                if response is None:
                    return
                await loop.sock_sendall(connection, struct.pack("!H", len(response)) + response)

    async def _forward(self, connection: socket.socket, address: str, port: int) -> None:
        if ipaddress.IPv4Address(address).is_loopback:
            raise ConnectionRefusedError  # the sandbox's own: nobody listens there
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as proxy:
            proxy.setblocking(False)
            async with asyncio.timeout(_HANDSHAKE_S):
                await loop.sock_connect(proxy, ("127.0.0.1", self._port))
                own = proxy.getsockname()[1]
                self._settings.connected[own] = task
                try:
                    await self._greet(proxy, address, port)
                except BaseException:
                    self._settings.connected.pop(own, None)
                    raise
            try:
                await self._pump(connection, proxy)
            finally:
                self._settings.connected.pop(own, None)

    async def _greet(self, proxy: socket.socket, address: str, port: int) -> None:
        """SOCKS5 with a name and a password (RFC 1928, RFC 1929)."""
        loop = asyncio.get_running_loop()
        user, password = self.sandbox.encode(), self._password.encode()
        await loop.sock_sendall(proxy, b"\x05\x01\x02")
        if await _exactly(proxy, 2) != b"\x05\x02":
            raise ConnectionRefusedError
        await loop.sock_sendall(proxy, bytes([1, len(user)]) + user + bytes([len(password)]) + password)
        if await _exactly(proxy, 2) != b"\x01\x00":
            raise ConnectionRefusedError
        destination = ipaddress.IPv4Address(address).packed + struct.pack("!H", port)
        await loop.sock_sendall(proxy, b"\x05\x01\x00\x01" + destination)
        if (await _exactly(proxy, 10))[:2] != b"\x05\x00":
            raise ConnectionRefusedError

    async def _pump(self, connection: socket.socket, proxy: socket.socket) -> None:
        """Both ways, until both have ended, or nothing has moved for `timeout_s`."""
        way_back = _Way()
        try:
            async with asyncio.timeout(self._settings.timeout_s) as deadline, asyncio.TaskGroup() as group:
                group.create_task(self._copy(connection, proxy, deadline, _Way()))
                group.create_task(self._copy(proxy, connection, deadline, way_back))
        except* TimeoutError as e:
            # A program that does not read what came keeps itself waiting.
            if not way_back.is_full:
                self._settings.on_stalled(proxy.getsockname()[1])
            raise ConnectionResetError from e
        except* OSError as e:
            raise ConnectionResetError from e

    async def _copy(self, source: socket.socket, target: socket.socket, deadline: asyncio.Timeout, way: _Way) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, _CHUNK):
            way.is_full = True
            await loop.sock_sendall(target, data)
            way.is_full = False
            deadline.reschedule(loop.time() + self._settings.timeout_s)
        target.shutdown(socket.SHUT_WR)


class _Way:
    """One direction of a connection."""

    is_full = False
    """Whether its end takes no more, for the moment."""


class Gate(Forwarder):
    """Serves one sandbox."""

    def __init__(
        self, sandbox: str, fds: list[int], password: str, port: int, knows: Callable[[str], bool], settings: Settings
    ) -> None:
        """Start to serve; there is a running event loop.

        Args:
            sandbox: its name.
            fds: two listening sockets for connections, one for questions, and one for datagrams with questions.
            password: of mitmproxy's port.
            port: mitmproxy's, on loopback.
            knows: whether a name has an address.
            settings: how much, and how long.
        """
        super().__init__(sandbox, password, port, knows, settings)
        self._sockets = [socket.socket(fileno=fd) for fd in fds]
        for each in self._sockets:
            each.setblocking(False)
        *web, questions, datagrams = self._sockets
        self._closing: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(settings.connections + len(self._sockets) - 1)  # each listener holds one
        loop = asyncio.get_running_loop()
        self._datagrams = datagrams
        loop.add_reader(datagrams, self._on_datagram)
        self._loops = [asyncio.create_task(self._accept(listener, self._forward_there)) for listener in web]
        self._loops.append(asyncio.create_task(self._accept(questions, self._answer)))

    def close(self) -> None:
        """Stop serving: what is open is reset, and what comes is refused. Idempotent; raises nothing."""
        if self._closing is None:
            asyncio.get_running_loop().remove_reader(self._datagrams)
        for task in (*self._loops, *self._open):
            task.cancel()
        self._closing = self._closing or asyncio.create_task(self._close())

    async def _close(self) -> None:
        # Not before nobody waits for them any more: their numbers may be those of the next sandbox's at once.
        await asyncio.gather(*self._loops, *self._open, return_exceptions=True)
        for each in self._sockets:
            each.close()

    async def _accept(self, listener: socket.socket, serve: Callable) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                self._slots.release()
                await asyncio.sleep(0.05)  # no descriptors left, for the moment
                continue
            except asyncio.CancelledError:
                self._slots.release()
                raise
            connection.setblocking(False)
            self._keep(self._serve_accepted(serve, connection))

    async def _serve_accepted(self, serve: Callable, connection: socket.socket) -> None:
        try:
            await self._serve(serve, connection)
        finally:
            self._slots.release()

    async def _forward_there(self, connection: socket.socket) -> None:
        await self._forward(connection, *connection.getsockname())

    def _on_datagram(self) -> None:
        for _ in range(_QUESTIONS_AT_A_TIME):
            try:
                query, sender = self._datagrams.recvfrom(4096)
            except OSError:
                return  # no more of them
            response = names.answer(query, self._knows)
            if response is not None:
                with contextlib.suppress(OSError):
                    self._datagrams.sendto(response, sender)


class Settings:
    """What all gates of a proxy share."""

    def __init__(self, connections: int, timeout_s: float) -> None:
        """As in `policy.Policy`."""
        self.connections, self.timeout_s = connections, timeout_s
        self.connected: dict[int, asyncio.Task[None]] = {}
        """By the port from which it goes on to mitmproxy."""
        self.on_stalled: Callable[[int], None] = lambda port: None
        """Told the port of a connection on which nothing has moved for `timeout_s`, though its program reads."""

    def abort(self, port: int) -> None:
        """Reset the connection that goes on from this port. Raises nothing."""
        if task := self.connected.get(port):
            task.cancel()


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        chunk = await loop.sock_recv(connection, num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
