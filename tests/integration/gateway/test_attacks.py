"""Attacks through the gateway, by a program in a real sandbox of either backend: on the key and the record of another.

Two episodes are open on one gateway. The attacker's program may do as it likes with its own key; it must get nothing of
what the other's policy has said, and the other's record must hold what its own policy said and nothing else. An attack
says `tried` when it has done what it says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import pytest

from composer.contract import SandboxBackend, SandboxLimits
from composer.gateway.agent import PORT, AgentProgram, ExternalHarness
from composer.gateway.record import EpisodeRecord
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits, ToolClock
from envs.sandbox.bubblewrap import BubblewrapBackend
from tests.unit.gateway.policy import Policy

pytestmark = pytest.mark.attacks
LIMITS = HarnessLimits(max_turns=90, max_turn_tokens=100, max_model_len=4000)
SECRET, OWN = "what the other was told", "what I was told"
THEIRS = {"model": "m", "messages": [{"role": "user", "content": "theirs"}]}
HEAD = """
import json, os, socket, sys, urllib.error, urllib.request

KEY, OLD, URL = os.environ["KEY"], os.environ["OLD"], os.environ["URL"]
THEIRS = json.loads(os.environ["THEIRS"])
MINE = {"model": "m", "messages": [{"role": "user", "content": "mine"}]}

def ask(body=MINE, key=KEY, path="/v1/chat/completions", method="POST", **headers):
    "Status and text of an answer."
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers}
    data = json.dumps(body).encode() if method == "POST" else None
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, data, given, method=method)) as answer:
            said = answer.read().decode()
            assert "the other" not in said, said
            return answer.status, said
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (ValueError, OSError) as error:  # what no client would send
        return 0, str(error)

assert ask()[0] == 200
"""
ATTACKS = {
    "keys near its own": """
flipped = [KEY[:at] + ("A" if KEY[at] != "A" else "B") + KEY[at + 1:] for at in range(len(KEY))]
for key in ["", "sk-", KEY[:-1], KEY + "A", KEY.swapcase(), KEY[::-1], "*", "None", "0", "../" + KEY, *flipped]:
    status, said = ask(key=key)
    assert status in (0, 401), (key, status, said)
print("tried")
""",
    "the key of an episode that has ended": """
status, said = ask(key=OLD)
assert status == 401 and ask(MINE, "", x_api_key=OLD)[0] == 401, (status, said)
print("tried")
""",
    "another's name in the body, the headers and the path": """
for more in ({"episode_id": "g/1"}, {"user": "g/1"}, {"metadata": {"episode_id": "g/1"}}, {"record": "g/1"}):
    print(ask({**MINE, **more}))
print(ask(X_Episode="g/1", X_Forwarded_For="127.0.0.1", Host="g.1", Cookie="episode=g/1"))
for path in ("/v1/g/1/chat/completions", "/g/1/v1/chat/completions", "/v1/chat/completions?episode=g/1", "/v1/../g/1"):
    print(ask(path=path))
print("tried")
""",
    "a replay of what the other has asked": """
for more in ({}, {"x_stainless_retry_count": "1"}, {"idempotency_key": "theirs"}, {"idempotency_key": "theirs"}):
    status, said = ask(THEIRS, **more)
    assert status == 200 and "what I was told" in said, (status, said)
print("tried")
""",
    "what the other was answered, by its number": """
for number in ("resp_0", "resp_1", "0", "1", "g/1", "chatcmpl-0", "-1"):
    for body in ({"input": "a", "previous_response_id": number}, {"input": [{"type": "item_reference", "id": number}]}):
        print(ask({"model": "m", **body}, path="/v1/responses"))
    print(ask(path="/v1/responses/" + number, method="GET"))
print("tried")
""",
    "a connection that was let in once": """
body = json.dumps(MINE)
with socket.create_connection(("127.0.0.1", PORT)) as sock:
    for key in (KEY, "", "sk-other"):
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: {len(body)}\\r\\n"
        sock.sendall((head + (f"Authorization: Bearer {key}\\r\\n" if key else "") + "\\r\\n" + body).encode())
    said = b""
    while chunk := sock.recv(65536):
        said += chunk
        if said.count(b"HTTP/1.1") == 3 and said.rstrip().endswith(b"}"):
            break
assert said.count(b"HTTP/1.1 200") == 1, said
print("tried")
""",
    "one request in another": """
inner = "GET /v1/models HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"
head = "POST /v1/models HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
with socket.create_connection(("127.0.0.1", PORT)) as sock:
    sock.sendall((head % (5 + len(inner)) + "0\\r\\n\\r\\n" + inner).encode())
    sock.settimeout(3)
    said = b""
    try:
        while chunk := sock.recv(65536):
            said += chunk
    except TimeoutError:
        pass
assert b"200 OK" not in said, said
print("tried")
""",
    "two keys at once": """
for first, second in ((KEY, "sk-other"), ("sk-other", KEY), (KEY, OLD), (OLD, KEY)):
    print(ask(key=first, x_api_key=second))
    print(ask(key=first + ", Bearer " + second), ask(key=first + " " + second))
print("tried")
""",
}


def play(runner: asyncio.Runner, backend: SandboxBackend, chat: Chat, script: str) -> None:
    files = {"/tmp/agent/agent.py": HEAD + script.replace("PORT", str(PORT))}
    theirs = Policy(chat, [SECRET])
    mine = Policy(chat, say=lambda _: OWN)

    async def main() -> tuple[EpisodeRecord, EpisodeRecord]:
        harness = ExternalHarness(AgentProgram((), {}, {}), chat, LIMITS)
        await harness.gateway.start()
        try:
            with harness.gateway.serving(harness.open("an earlier one")) as old:
                pass
            environment = {"URL": "{base_url}", "KEY": "{api_key}", "OLD": old, "THEIRS": json.dumps(THEIRS)}
            harness.program = AgentProgram(("python3", "/tmp/agent/agent.py"), environment, files)
            other, record = harness.open("theirs"), harness.open("mine")
            other.open(theirs, "g/1")
            with harness.gateway.serving(other) as key:
                headers = {"Authorization": f"Bearer {key}", "idempotency-key": "theirs"}
                url = f"{harness.gateway.url}/v1/chat/completions"
                async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=THEIRS) as answer:
                    assert SECRET in await answer.text()
                sandbox = await backend.start({}, SandboxLimits(lifetime_s=120.0))
                try:
                    await harness.run(record, sandbox, mine, "g/0", ToolClock())
                finally:
                    await sandbox.stop()
            return record, other
        finally:
            await harness.close()

    record, other = runner.run(main())
    said = record.metadata["agent"]["output"]
    assert record.metadata["agent"]["exit_code"] == 0 and said.endswith("tried"), said
    assert SECRET not in said
    assert len(other.turns) == 1 and theirs.recorded_exactly(other)
    assert len(record.turns) == len(mine.said) and mine.recorded_exactly(record)
    assert all(chat.decode(turn.generation.token_ids).startswith(OWN) for turn in record.turns)


@pytest.fixture(scope="module")
def backend(runner: asyncio.Runner) -> Iterator[BubblewrapBackend]:
    backend = BubblewrapBackend("gateway-attacks", profile="plain")
    yield backend
    runner.run(backend.close())


@pytest.fixture(scope="module")
def docker(runner: asyncio.Runner, docker_engine: str, docker_image: str) -> Iterator[SandboxBackend]:
    from envs.sandbox.docker.backend import DockerBackend

    backend = DockerBackend("gateway-attacks", host=docker_engine, image=docker_image)
    yield backend
    runner.run(backend.close())


@pytest.mark.parametrize("name", list(ATTACKS))
def test_bubblewrap_holds(runner: asyncio.Runner, backend: SandboxBackend, chat: Chat, name: str) -> None:
    play(runner, backend, chat, ATTACKS[name])


@pytest.mark.docker
@pytest.mark.parametrize("name", list(ATTACKS))
def test_docker_holds(runner: asyncio.Runner, docker: SandboxBackend, chat: Chat, name: str) -> None:
    play(runner, docker, chat, ATTACKS[name])
