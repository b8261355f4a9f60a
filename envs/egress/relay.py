"""The sandbox's end of a container's network: a program in a container of its own, in the network of the sandbox's.

It makes every address lead to its own sockets (gate.py), gives up all of its rights, and passes what arrives there on
over its standard input and output (carrier.py), at whose other end the proxy is. It reads no file, knows no secret, and
ends with its input: with whoever holds it.

    relay.py NUM_CONNECTIONS LIFETIME_S     says "ready" on standard error when all is there
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import socket
import struct
import sys
from collections.abc import Coroutine
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from envs.egress.carrier import ANSWER, OPEN, QUESTION, Carrier
from envs.egress.gate import open_sockets

READY = b"ready\n"
_NOBODY = 65534
_CHUNK = 2**16
_MOST_ASKERS = 1024


def give_up_rights() -> None:
    """Become nobody: with root's number go all capabilities, in this program for ever."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Pipes:
    """Standard input and output, for the event loop."""

    def __init__(self) -> None:
        for fd in (0, 1):
            os.set_blocking(fd, False)

    async def receive(self) -> bytes:
        while True:
            try:
                return os.read(0, _CHUNK)
            except BlockingIOError:
                await self._wait(0, is_writing=False)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(1, view) :]
            except BlockingIOError:
                await self._wait(1, is_writing=True)

    async def _wait(self, fd: int, is_writing: bool) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if is_writing else (loop.add_reader, loop.remove_reader)
        add(fd, lambda: future.done() or future.set_result(None))
        try:
            await future
        finally:
            remove(fd)


class Relay:
    """Passes on what arrives at the sockets."""

    def __init__(self, sockets: list[socket.socket], num_connections: int) -> None:
        """Of `gate.open_sockets`; there is a running event loop."""
        *self._listeners, self._datagrams = sockets
        for each in sockets:
            each.setblocking(False)
        pipes = _Pipes()
        self._carrier = Carrier(pipes.receive, pipes.send, self._take)
        self._slots = asyncio.Semaphore(num_connections)
        self._numbers = itertools.count(1)
        self._askers: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the input ends."""
        asyncio.get_running_loop().add_reader(self._datagrams, self._on_datagram)
        accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]
        reading = asyncio.create_task(self._carrier.run())
        await asyncio.wait([reading, *accepting], return_when=asyncio.FIRST_COMPLETED)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                self._slots.release()
                await asyncio.sleep(0.05)  # no descriptors left, for the moment
                continue
            connection.setblocking(False)
            self._start(self._pass_on(connection))

    async def _pass_on(self, connection: socket.socket) -> None:
        address, port = connection.getsockname()
        number = next(self._numbers) % 2**32
        try:
            line = self._carrier.line(number, connection)
            await self._carrier.send(OPEN, number, socket.inet_aton(address) + struct.pack("!H", port))
            await line.run()
        finally:
            self._slots.release()

    def _on_datagram(self) -> None:
        try:
            query, sender = self._datagrams.recvfrom(4096)
        except OSError:
            return
        number = next(self._numbers) % 2**32
        self._askers[number] = sender
        while len(self._askers) > _MOST_ASKERS:
            del self._askers[next(iter(self._askers))]
        self._start(self._carrier.send(QUESTION, number, query))

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == ANSWER and (sender := self._askers.pop(number, None)):
            with contextlib.suppress(OSError):  # who asked does not wait any more
                self._datagrams.sendto(payload, sender)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


async def _serve(sockets: list[socket.socket], num_connections: int, lifetime_s: float) -> None:
    relay = Relay(sockets, num_connections)
    os.write(2, READY)
    try:
        await asyncio.wait_for(relay.run(), lifetime_s)
    except TimeoutError:
        os.write(2, b"its lifetime is over\n")


def main() -> None:
    """Run the relay of `argv`."""
    try:
        sockets = open_sockets(None)
        give_up_rights()
    except OSError as e:
        os.write(2, f"the network cannot be set up: {e}\n".encode())
        os._exit(1)
    asyncio.run(_serve(sockets, int(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    main()
