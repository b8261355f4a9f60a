"""Frames over a real socket pair, in the pieces in which they arrive."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from envs.sandbox import frames


def test_a_frame_comes_back_whole() -> None:
    ours, theirs = socket.socketpair()
    header, body = {"op": "x", "path": "na\udcffme", "n": 1}, bytes(range(256)) * 5000

    def echo() -> None:
        for _ in range(2):
            request, payload = frames.receive(theirs)
            raw = frames.pack({**request, "n": 2}, payload)
            theirs.sendall(raw[:3])
            theirs.sendall(raw[3:11])
            theirs.sendall(raw[11:])

    thread = threading.Thread(target=echo)
    thread.start()
    ours.setblocking(False)

    async def exchange() -> None:
        assert await frames.exchange(ours, header, body) == ({**header, "n": 2}, body)
        assert await frames.exchange(ours, {}) == ({"n": 2}, b"")

    asyncio.run(exchange())
    thread.join()
    theirs.close()
    with pytest.raises(ConnectionError):
        asyncio.run(frames.receive_async(ours))
    ours.close()


def test_the_layout_of_a_frame() -> None:
    assert frames.pack({"a": 1}, b"xy") == b"\x00\x00\x00\x08\x00\x00\x00\x02" + b'{"a": 1}' + b"xy"
