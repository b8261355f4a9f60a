"""The client, against a real HTTP server with scripted answers and troubles."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from composer.autoinstall.client import ContextFullError, Endpoint
from composer.errors import ConfigError, GeneratorError
from composer.schema import InstallAgentConfig
from tests.integration.autoinstall.scripted_endpoint import ScriptedEndpoint, Trouble

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


def completion(**message) -> str:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def ask(turns, *, says_so=True, outage_timeout_s=5.0, request_timeout_s=1.0, **config):
    """The answer, the endpoint's client, the server, and the seconds it took."""
    server = ScriptedEndpoint({"proposer": turns}, says_so=says_so)
    with server.serving():
        agent = InstallAgentConfig(url=server.url("proposer"), model="small", **config)
        endpoint = Endpoint(agent, "autoinstall.proposer", request_timeout_s, outage_timeout_s)

        async def once():
            try:
                return await endpoint.ask(MESSAGES, TOOLS)
            finally:
                await endpoint.close()

        start = time.monotonic()
        try:
            reply = asyncio.run(once())
        except Exception as error:
            reply = error
        return reply, endpoint, server, time.monotonic() - start


def test_an_answer_and_what_is_known_of_who_gave_it():
    reply, endpoint, server, _ = ask([[("look", {"at": "x"})]], temperature=0.5, max_turn_tokens=77)
    assert [(c.name, json.loads(c.arguments)) for c in reply.calls] == [("look", {"at": "x"})]
    assert reply.tokens == 110
    [request] = server.requests["proposer"]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("small", 0.5, 77)
    assert request["tools"] == TOOLS and request["messages"] == MESSAGES
    known = endpoint.to_dict()
    assert known["models"] == "scripted stand-in" and known["answered_as"] == ["script-proposer"]


def test_an_endpoint_that_does_not_say_it_is_scripted_is_called_unverified():
    _, endpoint, _, _ = ask(["hello"], says_so=False)
    assert endpoint.to_dict()["models"] == "as the endpoint names them, unverified"


def test_without_native_tools_none_are_sent():
    _, _, server, _ = ask(["hello"], native_tools=False)
    assert "tools" not in server.requests["proposer"][0]


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(429, "{}"),
        Trouble(500, "boom"),
        Trouble(503, "{}"),
        Trouble(408, "{}"),
        Trouble(200, "{ this is no JSON"),
        Trouble(200, "[1, 2]"),
        Trouble(200, '{"choices": []}'),
        Trouble(200, '{"choices": null}'),
        Trouble(200, completion(content=None)),
        Trouble(200, completion(content=None, refusal="I will not")),
        Trouble(200, "{}", wait_s=1.5),
    ],
    ids=lambda t: f"{t.status}-{t.body[:24]}-{t.wait_s}",
)
def test_trouble_that_passes_is_tried_again(trouble):
    reply, endpoint, server, seconds = ask([trouble, "well again"])
    assert reply.content == "well again" and len(server.requests["proposer"]) == 2
    assert endpoint.num_retries == 1 and seconds >= 0.25


def test_trouble_that_does_not_pass_is_an_outage_in_time():
    reply, _, server, seconds = ask([Trouble(503, '{"error": "overloaded"}')], outage_timeout_s=2.0)
    assert isinstance(reply, GeneratorError) and "it answered 503" in str(reply)
    assert 2 <= len(server.requests["proposer"]) <= 6 and seconds < 3.0


def test_pauses_heed_what_the_endpoint_asks_for():
    reply, _, _, seconds = ask([Trouble(429, "{}", (("retry-after", "2"),)), "well again"])
    assert reply.content == "well again" and seconds >= 2.0


def test_nobody_there_is_an_outage():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        endpoint = Endpoint(InstallAgentConfig(url=url), "autoinstall.installer", 1.0, 1.0)
        with pytest.raises(GeneratorError, match=r"autoinstall\.installer\.url=.*cannot be reached"):
            asyncio.run(endpoint.ask(MESSAGES, TOOLS))


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refused_request_is_not_tried_again(status):
    reply, _, server, _ = ask([Trouble(status, '{"error": {"message": "no"}}'), "never"])
    assert isinstance(reply, GeneratorError) and f"refused the request with {status}" in str(reply)
    assert len(server.requests["proposer"]) == 1


def test_a_full_context_is_the_agents_own_end():
    body = '{"error": {"message": "This model\'s maximum context length is 512 tokens"}}'
    reply, *_ = ask([Trouble(400, body)])
    assert isinstance(reply, ContextFullError)


def test_the_key_comes_from_the_named_variable_and_is_kept_in_no_record(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    _, endpoint, server, _ = ask(["hello"], api_key_env="MY_KEY")
    assert server.authorizations == ["Bearer sk-very-secret"]
    assert "sk-very-secret" not in repr(endpoint) + json.dumps(endpoint.to_dict())
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"autoinstall\.proposer\.api_key_env='MY_KEY'"):
        Endpoint(InstallAgentConfig(api_key_env="MY_KEY"), "autoinstall.proposer", 1.0, 1.0)
