"""Frames of an engine's streams, and the socket under them."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.docker.stream import STDERR, STDOUT, ExecStream, FrameReader


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@given(
    frames=st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=40)), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_frames_come_out_however_they_were_cut(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(frame(*one) for one in frames)
    reader, got = FrameReader(), {STDOUT: b"", STDERR: b""}
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in zip(edges, edges[1:], strict=False):
        reader.feed(data[start:end])
        while (piece := reader.next()) is not None:
            got[piece[0]] += piece[1]
    for stream in got:
        assert got[stream] == b"".join(content for number, content in frames if number == stream)


def test_a_frame_need_not_be_whole_to_be_passed_on() -> None:
    reader = FrameReader(frame(1, b"x" * 2**20)[:100])
    assert reader.next() == (1, b"x" * 92)
    assert reader.next() is None


def test_waiting_ends_with_data_its_deadline_or_the_end() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        stream = ExecStream("id", ours, frame(1, b"early"))
        assert await stream.receive(1) == (1, b"early")
        began = asyncio.get_running_loop().time()
        assert await stream.receive(0.05) is None and not stream.ended
        assert 0.04 < asyncio.get_running_loop().time() - began < 1
        theirs.sendall(frame(2, b"late"))
        assert await stream.receive(1) == (2, b"late")
        await stream.send(b"in")
        stream.end_input()
        assert theirs.recv(10) == b"in" and theirs.recv(10) == b""
        theirs.close()
        assert await stream.receive(1) is None and stream.ended
        stream.close()

    asyncio.run(scenario())


def test_closing_wakes_who_waits() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        stream = ExecStream("id", ours)
        waiting = asyncio.ensure_future(stream.receive(30))
        await asyncio.sleep(0.01)
        stream.close()
        assert await asyncio.wait_for(waiting, 1) is None
        assert ours.fileno() == -1
        theirs.close()

    asyncio.run(scenario())


def test_a_cancelled_wait_loses_nothing() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        stream = ExecStream("id", ours)
        waiting = asyncio.ensure_future(stream.receive(30))
        await asyncio.sleep(0.01)
        theirs.sendall(frame(1, b"x"))
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await stream.receive(1) == (1, b"x")
        stream.close()
        theirs.close()

    asyncio.run(scenario())
