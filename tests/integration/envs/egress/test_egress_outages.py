"""An outage of what is allowed is a failure of the machine; it is never shown to a model as an answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from composer.contract import Grade, SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from composer.rollout.episode import Rubric, run_episode
from composer.rollout.prepare import PreparedTask
from composer.types import Outcome, Task
from envs.egress import client
from tests.integration.envs.egress.upstream import Upstream
from tests.integration.envs.egress.world import DENIED, VARIABLE, egress, lines

ONLINE = SandboxLimits(network=True)
OUTAGE = "which its network policy allows, cannot be reached"


def outage_of(policy: Mapping[str, Any], command: str, make: Callable, runner: asyncio.Runner) -> tuple[str, dict]:
    """What a command's outage is called, or its output where there was none; and the proxy's counts."""
    backend = make("trouble", policy)

    async def use() -> str:
        sandbox = await backend.start({}, ONLINE)
        try:
            output = (await sandbox.shell(command, 30)).output.decode()
        except SandboxError as e:
            with pytest.raises(SandboxError, match=OUTAGE):
                await sandbox.files()
            output = f"{e}"
        else:
            await sandbox.files()
        await sandbox.stop()
        return output

    output = runner.run(use())
    runner.run(backend.close())
    return output, backend.proxy.counts["00001"]


@pytest.mark.parametrize("trouble", ["nobody listens", "a certificate of nobody", "no address", "hangs up", "silence"])
def test_an_allowed_host_in_trouble(
    trouble: str, upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner
) -> None:
    policy = egress(upstream, log, timeout_s=3.0)
    url = "https://open.test/trouble"
    upstream.statuses.clear()
    match trouble:
        case "nobody listens":
            policy["addresses"]["open.test"] = "127.0.0.1:1"
        case "a certificate of nobody":
            policy["upstream_ca"] = ""
        case "no address":
            policy["rules"].append({"host": "gone.invalid"})
            url = "https://gone.invalid/"
        case "hangs up":
            upstream.statuses["open.test/trouble"] = 0
        case "silence":
            upstream.statuses["open.test/trouble"] = -1
    output, counts = outage_of(policy, f"curl -sS -m 20 {url} 2>&1", make, runner)
    assert OUTAGE in output, output
    assert (counts["requests"], counts["failed"], counts["outages"]) == (1, 1, 1)
    last = lines(log)[-1]
    assert (last["verdict"], last["reason"], last["status"]) == ("failed", "outage", None)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_an_index_in_trouble(
    status: int, upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner
) -> None:
    upstream.statuses = {"index.test/simple/demo/": status}
    output, counts = outage_of(egress(upstream, log), "curl -sS -m 20 https://index.test/simple/demo/", make, runner)
    assert OUTAGE in output and f"it answered with {status}" in output
    assert counts["outages"] == 1
    upstream.statuses.clear()


def test_answers_and_choices_of_a_program_are_no_outage(
    upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner
) -> None:
    """What a program can bring about by itself must not take away the reward of what it has done."""
    upstream.statuses = {"open.test/broken": 503, "open.test/slow": -1, "index.test/simple/none/": 404}
    upstream.page("open.test/much", b"x" * 2**22, "application/octet-stream")
    policy = egress(upstream, log, timeout_s=3.0)
    policy["addresses"] |= {"api.test": "127.0.0.1:1"}
    commands = {
        # An ordinary server's answer is an answer; an index's word on a package too.
        "curl -sS -m 9 -o /dev/null -w '%{http_code}' https://open.test/broken": "503",
        "curl -sS -m 9 -o /dev/null -w '%{http_code}' https://index.test/simple/none/": "404",
        # It does not wait.
        "curl -sS -m 1 -o /dev/null -w '%{http_code}' https://open.test/slow 2>/dev/null": "000",
        # It does not read.
        "(curl -sS https://open.test/much | sleep 6) 2>/dev/null; echo done": "done\n",
        # It asks for nothing.
        "timeout 9 openssl s_client -quiet -connect open.test:443 >/dev/null 2>&1; echo done": "done\n",
        # It speaks plain HTTP where nobody does; it is denied.
        "curl -sS -m 9 -o /dev/null -w '%{http_code}' http://api.test/v1/x 2>/dev/null": "000",
        "curl -sS -m 9 https://no.test/": DENIED,
    }
    backend = make("choices", policy)

    async def use() -> list[str]:
        sandbox = await backend.start({}, ONLINE)
        return [(await sandbox.shell(command, 30)).output.decode() for command in commands]

    assert runner.run(use()) == list(commands.values())
    upstream.statuses.clear()


def test_when_the_proxy_dies_its_sandboxes_are_lost_and_new_ones_get_a_new_one(
    upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner
) -> None:
    backend = make("lost", egress(upstream, log))

    async def use() -> None:
        sandbox = await backend.start({}, ONLINE)
        offline = await backend.start({}, SandboxLimits())
        working = asyncio.create_task(sandbox.shell("sleep 20; curl https://open.test/", 30))
        await asyncio.sleep(0.5)
        os.kill(backend.proxy.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await asyncio.wait_for(working, 10)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await sandbox.shell("true")
        await sandbox.stop()
        assert (await offline.shell("echo fine")).output == b"fine\n"
        another = await backend.start({}, ONLINE)
        assert (await another.shell("curl -sS https://open.test/")).output == b"hello from open.test\n"

    runner.run(use())


class _Agent:
    """Runs one command, then hands in, whatever it saw; a harness as the product's own is one."""

    def __init__(self, command: str) -> None:
        self.command, self.tools, self.saw = command, {}, []

    def open(self, request: str, with_prompt: bool = True) -> Any:
        class Conversation:
            turns: list = []
            messages: list = []
            metadata: dict = {}

        return Conversation()

    async def run(self, conversation: Any, sandbox: Any, generate: Any, episode_id: str, clock: Any) -> Outcome:
        self.saw.append((await sandbox.shell(self.command, 20)).output.decode())
        return Outcome.FINISHED


class _Right:
    name = "right"

    async def grade(self, task: Task, files: Any, backend: Any, trajectory: Any) -> Grade:
        return Grade(1.0)


@pytest.mark.parametrize("is_down", [True, False])
def test_an_episode_with_an_outage_has_no_reward(
    is_down: bool, upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner
) -> None:
    upstream.statuses = {"index.test/simple/demo/": 503 if is_down else 404}
    backend = make("episode", egress(upstream, log))
    agent = _Agent("curl -sS -m 20 -o /dev/null -w '%{http_code}' https://index.test/simple/demo/ 2>&1")
    state = PreparedTask(Task("t", "", {}, {}), backend, SandboxLimits(), 1)

    async def generate(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asks")

    episode = runner.run(
        run_episode(
            state,
            harness=agent,  # pyright: ignore[reportArgumentType]
            rubric=Rubric({"right": _Right()}),
            generate=generate,
            limits=SandboxLimits(),
            timeout_s=60.0,
            group_id="g",
            episode_id="g/0",
        )
    )
    if is_down:
        assert (episode.outcome, episode.reward, agent.saw) == (Outcome.INFRASTRUCTURE_ERROR, None, [])
        assert OUTAGE in episode.error
    else:
        assert (episode.outcome, episode.reward, agent.saw) == (Outcome.FINISHED, 1.0, ["404"])
    upstream.statuses.clear()


def test_without_mitmproxy_no_sandbox_starts(
    upstream: Upstream,
    log: Path,
    make: Callable,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(client.VENV_VARIABLE, str(tmp_path))
    with pytest.raises(SandboxStartError, match="there is no mitmproxy in .*EGRESS=1 make setup"):
        runner.run(make("none", egress(upstream, log)).start({}, ONLINE))
    assert not client.finding(True).ok


def test_a_secret_that_is_not_there_stops_the_start(
    upstream: Upstream, log: Path, make: Callable, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SandboxStartError, match=VARIABLE):
        runner.run(make("none", egress(upstream, log)).start({}, ONLINE))
