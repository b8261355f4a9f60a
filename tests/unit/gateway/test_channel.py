"""The relay as a plain process, and what else may be at the other end of its channel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from composer.gateway.agent import fill_in
from composer.gateway.channel import RELAY, Channel
from composer.gateway.relay import CUT_OFF, HEADER, MAX_CONNECTIONS

ECHO = """
import socket, sys, threading
lines = []
def talk(word):
    with socket.create_connection(("127.0.0.1", {port})) as s:
        s.sendall(word.encode() * {times})
        s.shutdown(socket.SHUT_WR) if {half} else None
        got = b""
        while len(got) < len(word) * {times}:
            piece = s.recv(65536)
            if not piece: break
            got += piece
    lines.append("%s %d %s" % (word, len(got), got == word.encode() * {times}))
threads = [threading.Thread(target=talk, args=[w]) for w in ("ab", "cd", "ef")]
[t.start() for t in threads]; [t.join() for t in threads]
print(*lines, sep=chr(10))
sys.exit(5)
"""


def never(error: Exception) -> None:
    pytest.fail(f"nothing of ours has broken: {error!r}")


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
        *(sys.executable, "-c", RELAY, str(port)),
        env=dict(os.environ, RELAY_SETTINGS=settings),
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
            channel, port = Channel(target, never), free_port()
            script = ECHO.format(port=port, times=times, half=False)
            printed = await relay(port, [sys.executable, "-c", script], channel)
            assert channel.exit_code == 5
            assert sorted(printed.split("\n")) == ["", *(f"{w} {2 * times} True" for w in ("ab", "cd", "ef"))]

    asyncio.run(main())


def test_the_agent_has_its_variables_and_no_input() -> None:
    async def main() -> None:
        channel = Channel(1, never)
        script = "import os, sys; print(os.environ['WORD'], repr(sys.stdin.read()))"
        assert await relay(free_port(), [sys.executable, "-c", script], channel) == "given ''\n"
        assert channel.exit_code == 0

    asyncio.run(main())


def test_a_program_that_is_not_there() -> None:
    async def main() -> None:
        channel = Channel(1, never)
        assert await relay(free_port(), ["no-such-agent"], channel) == "no-such-agent: No such file or directory\n"
        assert channel.exit_code == 127

    asyncio.run(main())


def test_the_agent_ends_with_the_channel() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        settings = json.dumps({"command": ["sleep", "1000"], "environment": {}})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RELAY, str(free_port())),
            env=dict(os.environ, RELAY_SETTINGS=settings),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
        )
        theirs.close()
        async with asyncio.timeout(10):
            while not (children := psutil.Process(process.pid).children()):
                await asyncio.sleep(0.01)
        [child] = children
        ours.close()
        async with asyncio.timeout(10):
            assert await process.wait() == CUT_OFF
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
            channel = Channel(target, never)
            ours, theirs = socket.socketpair()
            theirs.sendall(words)
            theirs.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                await channel.carry(ours)
            assert channel.exit_code is None
            assert channel.has_hung_up == words.startswith((b"junk", frame(b"D", 1, length=2**32 - 1), b"Z"))
            theirs.close()

    asyncio.run(main())


def test_no_more_connections_than_allowed() -> None:
    async def main() -> None:
        async with echo_server() as target:
            channel = Channel(target, never)
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


async def talk(channel: Channel, words: bytes, wanted: bytes) -> bytes:
    """What the channel answers to a relay's words, up to the wanted ones."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    carrying, loop, said = asyncio.create_task(channel.carry(ours)), asyncio.get_running_loop(), b""
    await loop.sock_sendall(theirs, words)
    async with asyncio.timeout(10):
        while wanted not in said and (piece := await loop.sock_recv(theirs, 2**16)):
            said += piece
        theirs.close()
        await carrying
    return said


def test_a_gateway_that_cannot_be_reached_is_our_failure() -> None:
    """And the agent's client is told at once that its connection has ended, while the others go on."""
    broken: list[Exception] = []
    words = frame(b"O", 1) + frame(b"D", 1, b"x") + frame(b"O", 2)
    said = asyncio.run(talk(Channel(free_port(), broken.append), words, frame(b"C", 2)))
    assert said == frame(b"C", 1) + frame(b"C", 2)
    assert [type(error) for error in broken] == [ConnectionRefusedError] * 2


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [(ConnectionResetError("the gateway hung up"), False), (OSError(105, "No buffer space available"), True)],
)
def test_a_connection_that_breaks_on_its_way_to_the_gateway(error: OSError, is_ours: bool, monkeypatch) -> None:
    """That the gateway hangs up, as on a request that is no HTTP, is nothing; either way the client is told."""
    broken: list[Exception] = []

    async def read(self: asyncio.StreamReader, size: int) -> bytes:
        raise error

    async def main() -> bytes:
        async with echo_server() as target:
            with monkeypatch.context() as patch:
                patch.setattr("composer.gateway.channel.asyncio.StreamReader.read", read)
                return await talk(Channel(target, broken.append), frame(b"O", 1), frame(b"C", 1))

    assert asyncio.run(main()) == frame(b"C", 1)
    assert broken == ([error] if is_ours else [])


def test_what_breaks_in_the_carrying_itself_is_our_failure(monkeypatch) -> None:
    broken: list[Exception] = []
    bug = RuntimeError("bug")

    async def main() -> None:
        async with echo_server() as target:
            channel = Channel(target, broken.append)
            monkeypatch.setattr(channel, "_pass_on", lambda *_: (_ for _ in ()).throw(bug))
            assert await talk(channel, frame(b"O", 1) + frame(b"D", 1, b"x"), b"never said") == b""

    asyncio.run(main())
    assert broken == [bug]


def test_an_agent_that_opens_more_connections_than_are_carried_waits_for_them() -> None:
    """None is refused: as each ends, another one is taken."""
    script = f"""
import socket, threading
def talk(word):
    with socket.create_connection(("127.0.0.1", {{port}})) as s:
        s.sendall(word)
        assert s.recv(100) == word
    done.append(word)
done = []
threads = [threading.Thread(target=talk, args=[b"%d" % i]) for i in range({3 * MAX_CONNECTIONS + 8})]
[t.start() for t in threads]; [t.join(15) for t in threads]
print(len(done))
"""

    async def main() -> None:
        async with echo_server() as target:
            channel, port = Channel(target, never), free_port()
            printed = await relay(port, [sys.executable, "-c", script.format(port=port)], channel)
            assert printed == f"{3 * MAX_CONNECTIONS + 8}\n"

    asyncio.run(main())


def test_placeholders() -> None:
    given = {"{request}": "use {api_key}", "{api_key}": "sk-1"}
    assert fill_in("key={api_key}; {request} {other}", given) == "key=sk-1; use {api_key} {other}"
    assert fill_in("nothing", given) == "nothing" and fill_in("", given) == ""
