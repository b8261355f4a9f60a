"""Connections over one stream: two carriers, back to back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from envs.egress.carrier import DATA, HEADER, OPEN, WINDOW, Carrier


class Ends:
    """Two carriers over a socket pair; what is opened at the first arrives at the second."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        for each in self.sockets:
            each.setblocking(False)
        self.arrived: list[socket.socket] = []
        self.near, self.far = (
            self._carrier(each, take) for each, take in zip(self.sockets, (print, self._take), strict=True)
        )
        self.tasks = [asyncio.ensure_future(carrier.run()) for carrier in (self.near, self.far)]

    def _carrier(self, end: socket.socket, take: Callable[..., Any]) -> Carrier:
        loop = asyncio.get_running_loop()
        return Carrier(lambda: loop.sock_recv(end, 2**16), lambda data: loop.sock_sendall(end, data), take)

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        assert kind == OPEN
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        self.arrived.append(ours)
        self.tasks.append(asyncio.ensure_future(self.far.line(number, theirs).run()))

    async def open(self, number: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        line = self.near.line(number, theirs)
        await self.near.send(OPEN, number)
        self.tasks.append(asyncio.ensure_future(line.run()))
        while len(self.arrived) < number:
            await asyncio.sleep(0.001)
        return ours, self.arrived[number - 1]


def run(work: Callable[[Ends], Any]) -> None:
    async def main() -> None:
        ends = Ends()
        try:
            async with asyncio.timeout(20):
                await work(ends)
        finally:
            for task in ends.tasks:
                task.cancel()
            await asyncio.gather(*ends.tasks, return_exceptions=True)

    asyncio.run(main())


async def everything(end: socket.socket) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(end, 2**16):
        found += data
    return found


def test_bytes_arrive_both_ways_and_so_do_ends() -> None:
    async def work(ends: Ends) -> None:
        loop = asyncio.get_running_loop()
        near, far = await ends.open(1)
        sent = bytes(range(256)) * 8192  # eight windows
        sending = asyncio.ensure_future(loop.sock_sendall(near, sent))
        answer = asyncio.ensure_future(everything(far))
        await sending
        near.shutdown(socket.SHUT_WR)
        assert await answer == sent
        await loop.sock_sendall(far, b"and back")  # one direction has ended, the other has not
        far.close()
        assert await everything(near) == b"and back"
        await asyncio.sleep(0.05)
        assert not ends.near.lines and not ends.far.lines

    run(work)


def test_one_that_nobody_reads_holds_up_no_other() -> None:
    async def work(ends: Ends) -> None:
        loop = asyncio.get_running_loop()
        stuck, _ = await ends.open(1)
        filling = asyncio.ensure_future(loop.sock_sendall(stuck, bytes(2**23)))
        await asyncio.sleep(0.2)
        assert not filling.done()
        assert ends.far.lines[1]._num_queued <= WINDOW
        near, far = await ends.open(2)
        await loop.sock_sendall(near, b"ping")
        assert await loop.sock_recv(far, 10) == b"ping"
        filling.cancel()

    run(work)


def test_a_break_is_a_break_at_the_other_end() -> None:
    async def work(ends: Ends) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            program = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        accepted.setblocking(False)
        program.setblocking(False)
        line = ends.near.line(1, accepted)
        await ends.near.send(OPEN, 1)
        ends.tasks.append(asyncio.ensure_future(line.run()))
        while not ends.arrived:
            await asyncio.sleep(0.001)
        ends.far.lines[1].is_broken = True
        ends.arrived[0].close()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(program, 10)

    run(work)


def test_who_sends_more_than_a_window_is_cut_off() -> None:
    async def work(ends: Ends) -> None:
        near, far = await ends.open(1)
        for _ in range(2 + WINDOW * 3 // 60000):
            await ends.near.send(DATA, 1, bytes(60000))
        await asyncio.sleep(0.2)
        assert not ends.far.lines
        assert len(await everything(far)) <= WINDOW + 2**18

    run(work)


def test_the_stream_ends_and_with_it_its_connections() -> None:
    async def work(ends: Ends) -> None:
        near, _ = await ends.open(1)
        ends.sockets[1].shutdown(socket.SHUT_RDWR)
        assert await everything(near) == b""
        assert HEADER.size == 7

    run(work)
