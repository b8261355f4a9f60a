"""JSON-RPC over a real socket, with a peer that does everything wrong that it can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from envs.tools.rpc import PeerError, PeerTimeout, RpcConnection, RpcError

Peer = Callable[[socket.socket], None]


def ask(peer: Peer, *, timeout_s: float = 5.0, most: int = 2**16, times: int = 1, params: Any = None) -> Any:
    """The answer to the last of some requests to a peer that runs in a thread."""

    async def work() -> Any:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=_run, args=(peer, theirs), daemon=True)
        thread.start()
        connection = RpcConnection(ours, most)
        try:
            for _ in range(times - 1):
                with pytest.raises(PeerTimeout):
                    await connection.request("slow", {}, 0.05)
            return await connection.request("add", params or {"a": 1}, timeout_s)
        finally:
            connection.close()
            await asyncio.to_thread(thread.join, 5)
            assert not thread.is_alive()

    return asyncio.run(work())


def _run(peer: Peer, theirs: socket.socket) -> None:
    with theirs, contextlib.suppress(OSError):
        peer(theirs)


def requests(sock: socket.socket) -> Any:
    with sock.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def answering(*lines: str | bytes) -> Peer:
    """A peer that answers the first request by these lines; `ID` in them is its number."""

    def peer(sock: socket.socket) -> None:
        for request in requests(sock):
            for line in lines:
                data = line if isinstance(line, bytes) else line.replace("ID", str(request["id"])).encode() + b"\n"
                sock.sendall(data)

    return peer


def test_a_request_and_its_answer() -> None:
    seen: list[Any] = []

    def peer(sock: socket.socket) -> None:
        for request in requests(sock):
            seen.append(request)
            sock.sendall(b'{"jsonrpc": "2.0", "id": 1, "result": {"sum": 3}}\n')

    assert ask(peer, params={"a": 1, "b": "é\n"}) == {"sum": 3}
    assert seen == [{"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": 1, "b": "é\n"}}]


def test_what_comes_before_the_answer_is_passed_over() -> None:
    peer = answering(
        "",
        "Loading plugins...",
        b"\xff\xfe\n",
        "[" * 20_000,
        '"text"',
        '{"jsonrpc": "2.0", "id": ID, "res',
        '{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}',
        '{"jsonrpc": "2.0", "id": 99, "result": "of another"}',
        '{"jsonrpc": "2.0", "id": true, "result": "of none"}',
        '[{"jsonrpc": "2.0", "method": "log"}, {"jsonrpc": "2.0", "id": ID, "result": 7}]',
    )
    assert ask(peer) == 7


def test_what_the_peer_asks_is_answered() -> None:
    answers: list[Any] = []

    def peer(sock: socket.socket) -> None:
        messages = requests(sock)
        next(messages)
        sock.sendall(b'{"jsonrpc": "2.0", "id": "p", "method": "ping"}\n')
        answers.append(next(messages))
        sock.sendall(b'{"jsonrpc": "2.0", "id": 5, "method": "roots/list"}\n')
        answers.append(next(messages))
        sock.sendall(b'{"jsonrpc": "2.0", "id": 1, "result": null}\n')

    assert ask(peer) is None
    assert answers == [
        {"jsonrpc": "2.0", "id": "p", "result": {}},
        {"jsonrpc": "2.0", "id": 5, "error": {"code": -32601, "message": "method not found"}},
    ]


def test_an_error_is_one_of_the_peer_s() -> None:
    peer = answering('{"jsonrpc": "2.0", "id": ID, "error": {"code": -32602, "message": "no b", "data": {"x": 1}}}')
    with pytest.raises(RpcError, match="no b") as caught:
        ask(peer)
    assert (caught.value.code, caught.value.data) == (-32602, {"x": 1})


@pytest.mark.parametrize(
    ("peer", "trouble"),
    [
        (answering('{"jsonrpc": "2.0", "id": ID}'), "it wrote what is no answer"),
        (answering('{"jsonrpc": "2.0", "id": ID, "error": "text"}'), "it wrote what is no answer"),
        (answering(b"\n" * 2**21), "it wrote without an end"),
        (answering(b"[1]\n" * 2**16), "it wrote without an end"),
        (answering(b"x" * 2**18), "it wrote a message of more than 65536 bytes"),
        (answering(*['{"jsonrpc": "2.0", "method": "m", "params": "' + "x" * 60_000 + '"}'] * 20), "without an end"),
        (lambda sock: None, "it ended"),
        (lambda sock: sock.shutdown(socket.SHUT_WR), "it ended"),
    ],
)
def test_nonsense_is_no_answer(peer: Peer, trouble: str) -> None:
    with pytest.raises(PeerError, match=trouble) as caught:
        ask(peer)
    assert not isinstance(caught.value, RpcError)


def test_every_wait_ends() -> None:
    def reads_nothing(sock: socket.socket) -> None:
        threading.Event().wait(1)

    with pytest.raises(PeerTimeout, match="did not answer within 0.2 s"):
        ask(reads_nothing, timeout_s=0.2)
    with pytest.raises(PeerTimeout, match="did not answer within 0.2 s"):
        ask(reads_nothing, timeout_s=0.2, params={"text": "x" * 2**22})

    def talks(sock: socket.socket) -> None:
        while True:
            sock.sendall(b"\n" * 2**16)

    with pytest.raises(PeerError, match="did not answer within 0.2 s|without an end"):
        ask(talks, timeout_s=0.2)


def test_a_late_answer_is_not_taken_for_the_next() -> None:
    def peer(sock: socket.socket) -> None:
        for i, request in enumerate(requests(sock)):
            if i == 1:
                sock.sendall(b'{"jsonrpc": "2.0", "id": 1, "result": "late"}\n')
                sock.sendall(b'{"jsonrpc": "2.0", "id": %d, "result": "right"}\n' % request["id"])

    assert ask(peer, times=2) == "right"


def test_after_half_a_message_there_is_no_other() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = RpcConnection(ours)
            with pytest.raises(PeerTimeout):
                await connection.request("m", {"text": "x" * 2**22}, 0.1)
            assert connection.trouble == "it read nothing" and connection.num_requests == 1
            with pytest.raises(PeerError, match="it read nothing"):
                await connection.notify("m", {}, 1)

    asyncio.run(work())


def test_a_large_request_and_a_peer_that_first_says_more_than_the_socket_holds() -> None:
    def peer(sock: socket.socket) -> None:
        sock.sendall(b'{"jsonrpc": "2.0", "method": "log", "params": "%s"}\n' % (b"x" * 1000) * 500)
        request = next(requests(sock))
        sock.sendall(b'{"jsonrpc": "2.0", "id": 1, "result": %d}\n' % len(request["params"]["text"]))

    assert ask(peer, params={"text": "x" * 2**21}, timeout_s=20) == 2**21


def test_numbers_go_on_in_another_conversation() -> None:
    async def work() -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(b'"rest of a line"}\n{"jsonrpc": "2.0", "id": 7, "result": "late"}\n')
            theirs.sendall(b'{"jsonrpc": "2.0", "id": 8, "result": "right"}\n')
            connection = RpcConnection(ours, num_requests=7)
            answer = await connection.request("m", {}, 5)
            connection.hang_up()
            assert json.loads(theirs.makefile().readline())["id"] == 8
            return answer

    assert asyncio.run(work()) == "right"
