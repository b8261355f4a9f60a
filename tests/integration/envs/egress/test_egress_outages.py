"""An outage of what is allowed is a failure of the machine; it is never shown to a model as an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.egress import client, names
from tests.integration.envs.egress.upstream import CHUNKED, Upstream
from tests.integration.envs.egress.world import DENIED, SECRET, egress, lines, raw, status

@pytest.mark.parametrize("trouble", ["nobody listens", "a certificate of nobody"])
def test_a_server_in_trouble_ends_the_sandbox_and_is_no_output(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    values = egress(upstream, log)
    if trouble == "nobody listens":
        values["addresses"]["open.test"] = "127.0.0.1:1"
    else:
        values["upstream_ca"] = ""
    backend = BubblewrapBackend("trouble", egress=values, profile="plain")

    async def use() -> bytes:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        with pytest.raises(SandboxError, match="https://open.test, which its network policy allows, cannot be reached"):
            await sandbox.shell("curl -sS -m 10 -k https://open.test/ 2>&1")
        with pytest.raises(SandboxError, match="cannot be reached"):
            await sandbox.files()
        # What others do is not touched by it.
        other = await backend.start({}, SandboxLimits(network=True))
        return (await other.shell("curl -sS https://no.test/")).output

    upstream.requests.clear()
    try:
        output = runner.run(use())
    finally:
        runner.run(backend.close())
    assert output.decode() == DENIED
    last = lines(log)[-2]
    assert (last["verdict"], last["reason"], last["status"]) == ("failed", "outage", None)
    assert last["sandbox"] == "trouble/00001"
    assert upstream.requests == []
    assert backend.proxy is not None
    assert backend.proxy.counts["00001"] == {"requests": 1, "denied": 0, "failed": 1, "outages": 1, "bytes": 0}


def test_when_the_proxy_dies_its_sandboxes_are_lost_and_new_ones_get_a_new_one(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    backend = BubblewrapBackend("lost", egress=egress(upstream, log), profile="plain")

    async def use() -> None:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        assert backend.proxy is not None
        working = asyncio.create_task(sandbox.shell("sleep 20; curl https://open.test/", 30))
        await asyncio.sleep(0.5)
        os.kill(backend.proxy.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await asyncio.wait_for(working, 10)
        with pytest.raises(SandboxError, match="the egress proxy ended"):
            await sandbox.shell("true")
        await sandbox.stop()
        another = await backend.start({}, SandboxLimits(network=True))
        assert (await another.shell("curl -sS https://open.test/")).output == b"hello from open.test\n"

    try:
        runner.run(use())
    finally:
        runner.run(backend.close())


def test_without_mitmproxy_no_sandbox_starts(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", "k")
    monkeypatch.setenv(client.VENV_VARIABLE, str(tmp_path))
    backend = BubblewrapBackend("none", egress=egress(upstream, log))
    with pytest.raises(SandboxStartError, match="there is no mitmproxy in .*EGRESS=1 make setup"):
        runner.run(backend.start({}, SandboxLimits(network=True)))
    assert not client.finding(True).ok


def test_a_secret_that_is_not_there_stops_the_start(
    upstream: Upstream, log: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EGRESS_TEST_KEY", raising=False)
    backend = BubblewrapBackend("none", egress=egress(upstream, log))
    with pytest.raises(SandboxStartError, match="EGRESS_TEST_KEY"):
        runner.run(backend.start({}, SandboxLimits(network=True)))
    runner.run(backend.close())


