"""The same agent in a container: its two one-way streams carry what a socket carries in the other backend."""

from __future__ import annotations

import asyncio

import pytest

from composer.rollout.chat import Chat
from composer.types import Outcome
from tests.integration.gateway.test_agent import exact, play
from tests.unit.gateway.policy import Policy

pytestmark = pytest.mark.docker


def test_an_agent_in_a_container(
    runner: asyncio.Runner,
    chat: Chat,
    docker_engine: str,  # noqa: F811
    docker_image: str,  # noqa: F811
) -> None:
    from envs.sandbox.docker.backend import DockerBackend

    policy = Policy(chat, ["I will. " * 20, "Done."])
    script = """
first = ask([user])
open("done", "w").write("yes")
last = ask([user, first, {"role": "user", "content": "Is it done? " * 10}])
print("the agent says", last["content"])
sys.exit(7)
"""
    backend = DockerBackend("test", host=docker_engine, image=docker_image)
    try:
        t = play(runner, backend, chat, policy, script)
        assert (t.outcome, t.reward, t.error) == (Outcome.FINISHED, 1.0, "")
        assert t.metadata["agent"] == {"exit_code": 7, "output": "the agent says Done."}
        assert exact(policy, t)
    finally:
        runner.run(backend.close())
