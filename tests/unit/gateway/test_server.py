"""The gateway over HTTP, by hand: keys, retries, hanging up, and what is no request."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from composer.gateway import openai_chat
from composer.gateway.exchange import Ask
from composer.gateway.record import EpisodeRecord
from composer.gateway.server import Gateway
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits
from composer.types import FRESH, PREVIOUS
from tests.unit.gateway.policy import Policy

USER = {"role": "user", "content": "a"}
CHAT = "/v1/chat/completions"


class Client:
    """Sends requests with a key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.session, self.url, self.key = session, url, key

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {"Authorization": f"Bearer {self.key}", **named}
        async with self.session.post(self.url + path, data=data, headers=given) as answer:
            return answer.status, await answer.json()


def serve(
    chat: Chat, policy: Policy, talk: Callable[[Client, EpisodeRecord], Awaitable[None]], max_turns: int = 9
) -> EpisodeRecord:
    async def main() -> EpisodeRecord:
        gateway, record = Gateway(), EpisodeRecord(chat, HarnessLimits(max_turns=max_turns, max_model_len=2000))
        record.open(policy, "g/0")
        await gateway.start()
        await gateway.start()
        assert gateway.url.startswith("http://127.0.0.1:")
        try:
            async with aiohttp.ClientSession() as session:
                with gateway.serving(record) as key:
                    await talk(Client(session, gateway.url, key), record)
                status, error = await Client(session, gateway.url, key).post(CHAT, {"messages": [USER]})
                assert (status, error["error"]["code"]) == (401, "invalid_api_key"), "a key ends with its episode"
        finally:
            await gateway.stop()
            await gateway.stop()
        return record

    return asyncio.run(main())


def text(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_key_is_a_bearer_or_anthropics_header(chat: Chat) -> None:
    async def talk(client: Client, record: EpisodeRecord) -> None:
        assert (await client.post(CHAT, {"messages": [USER]}))[0] == 200
        body = {"messages": [USER], "max_tokens": 9}
        status, answer = await client.post("/v1/messages", body, Authorization="", x_api_key=client.key)
        assert status == 200 and answer["content"][0]["text"] == "two"
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer sk-other"}):
            status, error = await client.post("/v1/messages", body, **headers)
            assert (status, error["error"]["type"]) == (401, "authentication_error")

    assert len(serve(chat, Policy(chat, ["one", "two"]), talk).turns) == 2


def test_what_is_no_request(chat: Chat) -> None:
    async def talk(client: Client, record: EpisodeRecord) -> None:
        for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
            status, error = await client.post(CHAT, body)
            assert status == 400 and "must be a JSON object" in error["error"]["message"]
        for path, body in (
            (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}),
            ("/v1/responses", {"input": "a", "include": 7}),
            ("/v1/messages", {"messages": [USER], "system": [7]}),
        ):
            assert (await client.post(path, body))[0] == 400
        assert (await client.post("/v1/completions", {}))[0] == 404
        assert (await client.post("/v1/nothing", {}, anthropic_version="x"))[1]["error"]["type"] == "not_found_error"
        status, error = await client.post("/v1/responses", {"input": "a", "previous_response_id": "resp_x"})
        assert status == 400 and error["error"]["param"] == "previous_response_id"
        async with client.session.get(client.url + "/v1/models", headers={"x-api-key": client.key}) as answer:
            assert [m["id"] for m in (await answer.json())["data"]] == ["composer"]
        async with client.session.get(client.url + "/v1/models") as answer:
            assert answer.status == 401

    record = serve(chat, Policy(chat), talk)
    assert record.turns == [] and record.metadata["gateway"] == {"refused_bad_request": 8}


def test_the_same_question_again_is_a_new_sample_unless_it_says_that_it_is_a_retry(chat: Chat) -> None:
    async def talk(client: Client, record: EpisodeRecord) -> None:
        body = {"messages": [USER]}
        _, first = await client.post(CHAT, body, x_stainless_retry_count="0")
        _, again = await client.post(CHAT, body, x_stainless_retry_count="1")
        assert text(again) == text(first) == "one" and again["id"] == first["id"]
        assert text((await client.post(CHAT, body))[1]) == "two"
        assert text((await client.post(CHAT, body, idempotency_key="k"))[1]) == "three"
        assert text((await client.post(CHAT, body, idempotency_key="k"))[1]) == "three"
        other = {"messages": [{"role": "user", "content": "b"}]}
        assert text((await client.post(CHAT, other, x_stainless_retry_count="2"))[1]) == "four", "was never answered"

    record = serve(chat, Policy(chat, ["one", "two", "three", "four"]), talk)
    assert [t.parent for t in record.turns] == [PREVIOUS, FRESH, FRESH, FRESH]
    assert record.metadata["gateway"]["replayed"] == 2 and record.metadata["gateway"]["requests"] == 4


def test_who_hangs_up_leaves_nothing(chat: Chat) -> None:
    policy = Policy(chat, ["one"])

    async def talk(client: Client, record: EpisodeRecord) -> None:
        policy.gate = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post(CHAT, {"messages": [USER]}), 0.2)
        async with asyncio.timeout(5):
            while not policy.num_cancelled:
                await asyncio.sleep(0.01)
        assert record.turns == []
        policy.gate.set()
        assert text((await client.post(CHAT, {"messages": [USER]}))[1]) == "one"

    record = serve(chat, policy, talk)
    assert len(record.turns) == 1 and record.metadata["gateway"]["cancelled"] == 1


def test_an_answer_that_finds_its_client_gone_is_taken_back(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends in the moment in which the answer is there."""

    async def talk(client: Client, record: EpisodeRecord) -> None:
        noted, body = record.answer, json.dumps({"messages": [USER]}).encode()
        port = int(client.url.rpartition(":")[2])
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.key}\r\nContent-Length: {len(body)}"
        caller = socket.create_connection(("127.0.0.1", port))

        async def answer(ask: Ask) -> tuple:
            result = await noted(ask)
            caller.close()
            return result

        monkeypatch.setattr(record, "answer", answer)
        caller.sendall(head.encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(5):
            while "cancelled" not in record.metadata["gateway"]:
                await asyncio.sleep(0.01)
        assert record.turns == [] and record.messages == []
        monkeypatch.undo()
        assert text((await client.post(CHAT, body, x_stainless_retry_count="1"))[1]) == "two"

    assert len(serve(chat, Policy(chat, ["one", "two"]), talk).turns) == 1


def test_an_episode_has_a_number_of_requests_at_a_time(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.gateway.server._MAX_REQUESTS", 2)
    policy, most = Policy(chat, say=lambda _: "ok"), 0

    async def talk(client: Client, record: EpisodeRecord) -> None:
        nonlocal most
        policy.gate = asyncio.Event()
        asking = [asyncio.create_task(client.post(CHAT, {"messages": [USER]})) for _ in range(5)]
        for _ in range(50):
            await asyncio.sleep(0.005)
            most = max(most, record.metadata["gateway"].get("requests", 0))
        policy.gate.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 5

    assert len(serve(chat, policy, talk).turns) == 5 and most == 2


@pytest.mark.parametrize(
    ("where", "name"),
    [("chat", "encode_prompt"), ("chat", "decode"), ("record", "_find"), ("record", "_link"), ("api", "write")],
)
def test_what_breaks_here_fails_the_episode_and_is_no_fault_of_the_agents(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise AttributeError("bug")

    async def talk(client: Client, record: EpisodeRecord) -> None:
        with monkeypatch.context() as patch:
            patch.setattr({"chat": chat, "record": record, "api": openai_chat}[where], name, break_down)
            status, error = await client.post(CHAT, {"messages": [USER]})
        assert (status, error["error"]["code"]) == (503, "service_unavailable") and "bug" not in str(error)
        assert str(record.failure).endswith("raised AttributeError: bug") and record.ended.is_set()
        assert (await client.post(CHAT, {"messages": [USER]}))[0] == 503, "it is over, whatever works again"

    serve(chat, Policy(chat, ["one", "two"]), talk)


def test_counting_tokens_may_break_too(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(client: Client, record: EpisodeRecord) -> None:
        body, path = {"messages": [USER]}, "/v1/messages/count_tokens"
        assert (await client.post(path, body))[1]["input_tokens"] > 0 and record.failure is None
        assert (await client.post(path, b"["))[0] == 400 and record.failure is None
        monkeypatch.setattr(record, "_encode", lambda *_: 1 / 0)
        assert (await client.post(path, body))[0] == 503
        assert "ZeroDivisionError" in str(record.failure)

    serve(chat, Policy(chat), talk)


def test_bodies_that_are_not_what_they_say_are_the_clients_mistake(chat: Chat) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    deep = b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}"

    async def talk(client: Client, record: EpisodeRecord) -> None:
        port = int(client.url.rpartition(":")[2])
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.key}\r\n"
        for more in (
            b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nno gzip..",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + more)
            async with asyncio.timeout(5):
                assert b" 400 " in await reader.readline()
            writer.close()
        assert (await client.post(CHAT, gzip.compress(body), Content_Encoding="gzip"))[0] == 200
        for large in (b" " * (2**24 + 1), gzip.compress(b" " * 2**26)):
            encoding = {"Content_Encoding": "gzip"} if large[:1] != b" " else {}
            status, error = await client.post(CHAT, large, **encoding)
            assert status == 400 and "more than 16777216 bytes" in error["error"]["message"]
        status, error = await client.post(CHAT, deep)
        assert status == 400 and "nested too deep" in error["error"]["message"]
        status, error = await client.post(CHAT, {"messages": [USER], "stream": "yes"})
        assert status == 400 and error["error"]["param"] == "stream"
        assert record.failure is None and not record.ended.is_set()

    assert len(serve(chat, Policy(chat, ["one"]), talk).turns) == 1


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a":' * 99 + "1" + "}" * 99, "[", '{"a": NaN}'])
def test_calls_that_no_text_can_hold_are_history_like_others(chat: Chat, arguments: str) -> None:
    called = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}

    async def talk(client: Client, record: EpisodeRecord) -> None:
        said = [USER, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "t"}]
        assert (await client.post(CHAT, {"messages": said}))[0] == 200 and record.failure is None

    assert len(serve(chat, Policy(chat, ["one"]), talk).turns) == 1


def test_an_episode_sees_nothing_of_another(chat: Chat) -> None:
    """Two on one gateway: neither key leads to what the other was answered, by its id or as a retry."""
    other = EpisodeRecord(chat, HarnessLimits(max_turns=9, max_model_len=2000))
    other.open(Policy(chat, ["theirs"]), "g/1")

    async def main() -> None:
        gateway, record = Gateway(), EpisodeRecord(chat, HarnessLimits(max_turns=9, max_model_len=2000))
        record.open(Policy(chat, ["ours", "ours too"]), "g/0")
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as session:
                with gateway.serving(record) as key, gateway.serving(other) as their_key:
                    ours, theirs = Client(session, gateway.url, key), Client(session, gateway.url, their_key)
                    _, answer = await theirs.post("/v1/responses", {"input": "a"}, idempotency_key="k")
                    body = {"input": "b", "previous_response_id": answer["id"]}
                    assert (await ours.post("/v1/responses", body))[0] == 400
                    _, mine = await ours.post("/v1/responses", {"input": "a"}, x_stainless_retry_count="1")
                    assert mine["output"][0]["content"][0]["text"] == "ours"
                    _, mine = await ours.post("/v1/responses", {"input": "a"}, idempotency_key="k")
                    assert mine["output"][0]["content"][0]["text"] == "ours too"
                assert len(record.turns) == 2 and len(other.turns) == 1
        finally:
            await gateway.stop()

    asyncio.run(main())


def test_a_crowd_of_connections_is_served_one_after_the_other(chat: Chat) -> None:
    """While more ask than are answered at a time, a connection ends with its answer: another may wait for its place."""
    closed: list[bool] = []

    async def talk(client: Client, record: EpisodeRecord) -> None:
        async def ask(session: aiohttp.ClientSession) -> None:
            given = {"Authorization": f"Bearer {client.key}"}
            async with session.post(client.url + CHAT, json={"messages": [USER]}, headers=given) as answer:
                assert answer.status == 200
                closed.append(answer.headers.get("Connection") == "close")

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(ask(session) for _ in range(200)))
            await ask(session)

    policy = Policy(chat, say=lambda _: "ok")
    record = serve(chat, policy, talk, max_turns=300)
    assert len(record.turns) == 201 and policy.recorded_exactly(record)
    assert sum(closed) > 100 and not closed[-1], "the last one was alone"


def test_a_stream_that_breaks_off_is_had_again_and_is_not_sampled_twice(chat: Chat) -> None:
    async def talk(client: Client, record: EpisodeRecord) -> None:
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        port = int(client.url.rpartition(":")[2])
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.key}\r\nContent-Length: {len(body)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"\r\n\r\n" + body)
        assert b" 200 " in await reader.readline()
        writer.transport.abort()
        given = {"Authorization": f"Bearer {client.key}", "x-stainless-retry-count": "1"}
        async with client.session.post(client.url + CHAT, data=body, headers=given) as answer:
            assert b'"content": "one"' in await answer.read()
        assert record.metadata["gateway"]["replayed"] == 1

    assert len(serve(chat, Policy(chat, ["one", "two"]), talk).turns) == 1
