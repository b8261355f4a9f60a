"""The relay as a plain process, and what else may be at the other end of its channel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from composer.gateway.agent import fill_in
from composer.gateway.channel import MAX_CONNECTIONS, RELAY, Channel
from composer.gateway.relay import HEADER

ECHO = """
import socket, sys, threading
def talk(word):
    with socket.create_connection(("127.0.0.1", {port})) as s:
        s.sendall(word.encode() * {times})
        s.shutdown(socket.SHUT_WR) if {half} else None
        got = b""
        while len(got) < len(word) * {times}:
            piece = s.recv(65536)
            if not piece: break
            got += piece
    print(word, len(got), got == word.encode() * {times}, flush=True)
threads = [threading.Thread(target=talk, args=[w]) for w in ("ab", "cd", "ef")]
[t.start() for t in threads]; [t.join() for t in threads]
sys.exit(5)
"""


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """Says what it hears, until it hears nothing more."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


async def relay(port: int, command: list[str], channel: Channel) -> str:
    """Run the relay and a program under it; what both printed."""
    ours, theirs = socket.socketpair()
    settings = json.dumps({"command": command, "environment": {"WORD": "given"}})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RELAY, str(port), settings),
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        stderr=asyncio.subprocess.PIPE,
    )
    theirs.close()
    async with asyncio.timeout(20):
        await channel.carry(ours)
        _, printed = await process.communicate()
    return printed.decode()


@pytest.mark.parametrize("times", [1, 200_000], ids=["small", "large"])
def test_connections_are_carried_side_by_side(times: int) -> None:
    async def main() -> None:
        async with echo_server() as target:
            channel, port = Channel(target), free_port()
            script = ECHO.format(port=port, times=times, half=False)
            printed = await relay(port, [sys.executable, "-c", script], channel)
            assert channel.exit_code == 5
            assert sorted(printed.split("\n")) == ["", *(f"{w} {2 * times} True" for w in ("ab", "cd", "ef"))]

    asyncio.run(main())


def test_the_agent_has_its_variables_and_no_input() -> None:
    async def main() -> None:
        channel = Channel(1)
        script = "import os, sys; print(os.environ['WORD'], repr(sys.stdin.read()))"
        assert await relay(free_port(), [sys.executable, "-c", script], channel) == "given ''\n"
        assert channel.exit_code == 0

    asyncio.run(main())


def test_a_program_that_is_not_there() -> None:
    async def main() -> None:
        channel = Channel(1)
        assert await relay(free_port(), ["no-such-agent"], channel) == "no-such-agent: No such file or directory\n"
        assert channel.exit_code == 127

    asyncio.run(main())


def test_the_agent_ends_with_the_channel() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        settings = json.dumps({"command": ["sleep", "1000"], "environment": {}})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RELAY, str(free_port()), settings), stdin=theirs.fileno(), stdout=theirs.fileno()
        )
        theirs.close()
        await asyncio.sleep(0.3)
        [child] = psutil.Process(process.pid).children()
        ours.close()
        async with asyncio.timeout(10):
            await process.wait()
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def frame(kind: bytes, number: int, payload: bytes = b"", length: int | None = None) -> bytes:
    return HEADER.pack(kind, number, len(payload) if length is None else length) + payload


@pytest.mark.parametrize(
    "words",
    [
        b"junk" * 1000,
        frame(b"D", 1, length=2**32 - 1),
        frame(b"Z", 1),
        frame(b"D", 7, b"to nobody") + frame(b"C", 9) + frame(b"X", 0, b"no number"),
        frame(b"O", 1) * 3 + frame(b"D", 1, b"x") + frame(b"C", 1) * 2,
        frame(b"O", 1)[:5],
        b"",
    ],
    ids=["junk", "a huge frame", "an unknown kind", "out of place", "twice", "half a frame", "nothing"],
)
def test_whatever_the_other_end_says_ends_the_carrying_and_nothing_else(words: bytes) -> None:
    async def main() -> None:
        async with echo_server() as target:
            channel = Channel(target)
            ours, theirs = socket.socketpair()
            theirs.sendall(words)
            theirs.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                await channel.carry(ours)
            assert channel.exit_code is None
            theirs.close()

    asyncio.run(main())


def test_no_more_connections_than_allowed() -> None:
    async def main() -> None:
        async with echo_server() as target:
            channel = Channel(target)
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            carrying = asyncio.create_task(channel.carry(ours))
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(theirs, b"".join(frame(b"O", i) for i in range(MAX_CONNECTIONS + 2)))
            said = b""
            async with asyncio.timeout(10):
                while len(said) < 2 * HEADER.size:
                    said += await loop.sock_recv(theirs, 4096)
            assert said == frame(b"C", MAX_CONNECTIONS) + frame(b"C", MAX_CONNECTIONS + 1)
            theirs.close()
            await carrying

    asyncio.run(main())


def test_placeholders() -> None:
    given = {"{request}": "use {api_key}", "{api_key}": "sk-1"}
    assert fill_in("key={api_key}; {request} {other}", given) == "key=sk-1; use {api_key} {other}"
    assert fill_in("nothing", given) == "nothing" and fill_in("", given) == ""
