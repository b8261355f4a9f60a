"""Frames over a real socket pair, in the pieces in which they arrive."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from envs.sandbox import frames


def test_a_frame_comes_back_whole() -> None:
    ours, theirs = socket.socketpair()
    header, body = {"op": "x", "path": "na\udcffme", "n": 1}, bytes(range(256)) * 5000

    def echo() -> None:
        for _ in range(2):
            request, payload, fd = frames.receive(theirs)
            assert fd == -1
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


def test_a_file_descriptor_travels_with_a_frame(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    body = bytes(2**20)

    def answer() -> None:
        request, payload, fd = frames.receive(theirs)
        assert (request, payload, os.get_inheritable(fd)) == ({"op": "x"}, body, False)
        os.write(fd, b"through it")
        os.close(fd)
        theirs.sendall(frames.pack({}))

    thread = threading.Thread(target=answer)
    thread.start()
    with (tmp_path / "file").open("wb") as file:
        asyncio.run(frames.exchange(ours, {"op": "x"}, body, file.fileno()))
    thread.join()
    assert (tmp_path / "file").read_bytes() == b"through it"
    ours.close()
    theirs.close()


def test_the_layout_of_a_frame() -> None:
    assert frames.pack({"a": 1}, b"xy") == b"\x00\x00\x00\x08\x00\x00\x00\x02" + b'{"a": 1}' + b"xy"


def test_a_body_is_read_when_it_is_asked_for_and_once():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.pack({"op": "exec"}, b"secret") + frames.pack({"op": "read"}))
        request, body, fd = frames.receive_header(theirs)
        assert (request, len(body), fd) == ({"op": "exec"}, 6, -1)
        assert (body.read(), body.read(), len(body)) == (b"secret", b"", 0)
        assert frames.receive(theirs) == ({"op": "read"}, b"", -1)
