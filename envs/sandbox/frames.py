"""Messages between the backend, the fork server and the supervisors: a JSON header and raw bytes.

A frame is two big-endian u32 (length of the header, length of the body), the header in JSON, and the body. Bytes
travel only in the body; text in headers is what `json` escapes, lone surrogates of file names included. A file
descriptor may travel with a frame's first bytes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct(">II")
_LARGEST = 2**31


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def _lengths(raw: bytes) -> tuple[int, int]:
    header, body = _LENGTHS.unpack(raw)
    if header + body > _LARGEST:
        raise ConnectionError("a frame of more than 2 GiB")
    return header, body


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` from a blocking socket.

    Raises:
        ConnectionError: the other side hung up.
    """
    chunks = bytearray()
    while len(chunks) < num_bytes:
        chunk = sock.recv(min(num_bytes - len(chunks), 2**20))
        if not chunk:
            raise ConnectionError("the other side hung up")
        chunks += chunk
    return bytes(chunks)


class Body:
    """A frame's body that has not been read yet: a child that is forked meanwhile never holds it."""

    def __init__(self, sock: socket.socket, num_bytes: int) -> None:
        """It is what comes next on a blocking socket."""
        self._sock, self._left = sock, num_bytes

    def __len__(self) -> int:
        """How many bytes are still to come."""
        return self._left

    def read(self) -> bytes:
        """All of it; nothing the second time.

        Raises:
            ConnectionError: the other side hung up.
        """
        num_bytes, self._left = self._left, 0
        return receive_exactly(self._sock, num_bytes)


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes, int]:
    """Read one frame from a blocking socket.

    Returns:
        Header, body, and the file descriptor that came along, which no other program inherits; -1 if none did.

    Raises:
        ConnectionError: the other side hung up.
    """
    header, body, fd = receive_header(sock)
    return header, body.read(), fd


def receive_header(sock: socket.socket) -> tuple[dict[str, Any], Body, int]:
    """The same, but for the body, which is to be read before the next frame.

    Raises:
        ConnectionError: the other side hung up.
    """
    start, fds, _, _ = socket.recv_fds(sock, _LENGTHS.size, 1)
    if not start:
        raise ConnectionError("the other side hung up")
    for fd in fds:
        os.set_inheritable(fd, False)
    header, body = _lengths(start + receive_exactly(sock, _LENGTHS.size - len(start)))
    return json.loads(receive_exactly(sock, header)), Body(sock, body), fds[0] if fds else -1


async def exchange(
    sock: socket.socket, header: dict[str, Any], body: bytes = b"", fd: int = -1
) -> tuple[dict[str, Any], bytes]:
    """Send one frame over a non-blocking socket and wait for one frame back.

    Args:
        sock: nothing of an earlier exchange is in flight on it.
        header: what `json` can write.
        body: raw bytes.
        fd: a file descriptor to send along; -1: none. The caller may close it afterwards.

    Raises:
        ConnectionError: the other side hung up.
    """
    import asyncio  # here, since it would take a third of the fork server's memory

    loop = asyncio.get_running_loop()
    data = pack(header, body)
    if fd >= 0:
        # The socket's buffer is empty, so this does not block.
        data = data[socket.send_fds(sock, [data[: _LENGTHS.size]], [fd]) :]
    await loop.sock_sendall(sock, data)
    return await receive_async(sock)


async def receive_async(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read one frame from a non-blocking socket.

    Raises:
        ConnectionError: the other side hung up.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    raw = bytearray()
    wanted, lengths = _LENGTHS.size, None
    while True:
        # One answer is read at a time and nothing else is ever in flight, so reading past the frame cannot happen.
        chunk = await loop.sock_recv(sock, max(2**16, wanted - len(raw)))
        if not chunk:
            raise ConnectionError("the other side hung up")
        raw += chunk
        if lengths is None and len(raw) >= _LENGTHS.size:
            lengths = _lengths(bytes(raw[: _LENGTHS.size]))
            wanted = _LENGTHS.size + sum(lengths)
        if lengths is not None and len(raw) >= wanted:
            start = _LENGTHS.size + lengths[0]
            return json.loads(raw[_LENGTHS.size : start]), bytes(raw[start:wanted])
