"""JSON-RPC 2.0 over a stream socket, a message a line, with a peer that is not trusted.

Every wait has a deadline, messages have a size, and nothing that the peer sends raises anything but a `PeerError`.
Lines that are no messages are passed over: what a library prints, and the rest of what was not read to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import weakref
from collections.abc import Mapping
from typing import Any

_METHOD_NOT_FOUND = -32601
_CHUNK = 2**16
_MAX_FLOOD = 16
"""How many times the size of the largest message may come before the answer that is waited for."""
_LINE_COST = 256
"""Bytes that a line counts on top of its own."""
_MAX_QUOTED = 300


class PeerError(Exception):
    """The peer gave no answer: it hung up, was too slow, or sent what is no message."""


class RpcError(PeerError):
    """The peer answered with an error, and goes on."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        """As of JSON-RPC; `data` is what it adds."""
        super().__init__(message)
        self.code, self.data = code, data


class PeerTimeout(PeerError):
    """The answer did not come in time; it may still come."""

    def __init__(self, message: str, number: int) -> None:
        """`number` is the request's."""
        super().__init__(message)
        self.number = number


class RpcConnection:
    """One peer, or one conversation with it."""

    def __init__(self, sock: socket.socket, max_message_bytes: int = 2**20, num_requests: int = 0) -> None:
        """Take over a connected stream socket; it is closed when this object is gone.

        Args:
            sock: nothing is waiting in it but the rest of an earlier conversation.
            max_message_bytes: a peer that says more at a time is cut off.
            num_requests: how many requests the peer had in earlier conversations, so that no number comes twice.
        """
        sock.setblocking(False)
        self._sock, self._max_bytes = sock, max_message_bytes
        self._unread = bytearray()
        self._sending = asyncio.Lock()
        self.num_requests = num_requests
        self.trouble = ""
        """Why there will be no answer any more."""
        weakref.finalize(self, sock.close)

    def hang_up(self) -> None:
        """Say that nothing more is coming; what the peer has said can still be read."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self, trouble: str = "it was closed") -> None:
        """End the conversation."""
        self.trouble = self.trouble or trouble
        # The event loop may not have let go of the descriptor yet, whose number must not be another's by then.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """The result of a call; `params` are what `json` can write.

        Raises:
            RpcError: the peer answered with an error.
            PeerTimeout: there is no answer yet.
            PeerError: there is no answer. If `trouble` is set then, there will be none to others either.
        """
        self.num_requests += 1
        number = self.num_requests
        asked = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
        # At the same time, since a peer may not read before what it has written is read.
        sending = asyncio.ensure_future(self._send(asked))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answer_to(number)
                await sending
        except TimeoutError:
            raise PeerTimeout(f"it did not answer within {timeout_s:g} s", number) from None
        finally:
            sending.cancel()
            with contextlib.suppress(PeerError, asyncio.CancelledError):
                await sending
        if "error" in answer:
            error, code = answer["error"], answer["error"].get("code")
            message = str(error.get("message", ""))[:_MAX_QUOTED]
            raise RpcError(code if isinstance(code, int) else 0, message, error.get("data"))
        return answer["result"]

    async def notify(self, method: str, params: Mapping[str, Any], timeout_s: float) -> None:
        """Send a message that has no answer.

        Raises:
            PeerError: it could not be sent.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(json.dumps({"jsonrpc": "2.0", "method": method, "params": dict(params)}))
        except TimeoutError:
            raise PeerError(f"it took no message within {timeout_s:g} s") from None

    async def _send(self, message: str) -> None:
        async with self._sending:
            self._check()
            try:
                await asyncio.get_running_loop().sock_sendall(self._sock, message.encode() + b"\n")
            except OSError:
                raise self._lost("it ended") from None
            except asyncio.CancelledError:  # what comes after half a message would be read as its end
                self.close("it read nothing")
                raise

    async def _answer_to(self, number: int) -> dict[str, Any]:
        left = _MAX_FLOOD * self._max_bytes
        while left > 0:
            line = await self._line()
            left -= len(line) + _LINE_COST
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError):
                continue
            for message in parsed if isinstance(parsed, list) else [parsed]:  # a batch, in older protocols
                if not isinstance(message, dict):
                    continue
                if "method" in message:
                    await self._serve(message)
                elif message.get("id") == number and type(message["id"]) is int:
                    if "result" not in message and not isinstance(message.get("error"), dict):
                        raise self._lost(f"it wrote what is no answer: {line[:80]!r}")
                    return message
        raise self._lost("it wrote without an end")

    async def _serve(self, message: dict[str, Any]) -> None:
        """Answer what the peer asks, for which nothing is offered but a sign of life; notifications are not read."""
        if type(message.get("id")) not in (int, str):
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": _METHOD_NOT_FOUND, "message": "method not found"}
        await self._send(json.dumps(answer))

    async def _line(self) -> bytes:
        loop, searched = asyncio.get_running_loop(), 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if searched > self._max_bytes:
                raise self._lost(f"it wrote a message of more than {self._max_bytes} bytes")
            self._check()
            # What is there already is read without a turn of the loop, and the deadline would never come.
            await asyncio.sleep(0)
            try:
                chunk = await loop.sock_recv(self._sock, _CHUNK)
            except OSError:
                chunk = b""
            if not chunk:
                raise self._lost("it ended")
            self._unread += chunk
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def _check(self) -> None:
        if self.trouble:
            raise PeerError(self.trouble)

    def _lost(self, trouble: str) -> PeerError:
        self.close(trouble)
        return PeerError(self.trouble)
