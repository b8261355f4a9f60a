"""Hostile programs one after the other in bubblewrap sandboxes: calls end in time, and the host stays as it was."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend
from tests.integration.envs.sandbox.hostile_run import COUNT, Report, attack_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 + 8 * COUNT)]


def test_hostile_programs_leave_the_host_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    seen = {}

    async def scenario() -> Report:
        backend = BubblewrapBackend("hostile")
        try:
            witness = await backend.start({}, SandboxLimits(lifetime_s=3600))
            await witness.shell("COUNT=7")
            assert backend._server is not None
            server = psutil.Process(backend._server.watchdog).children()[0]
            seen["before"] = (server.num_fds(), server.memory_info().rss, len(server.children()))
            report = await attack_all(backend, witness)
            seen["after"] = (server.num_fds(), server.memory_info().rss, len(server.children()))
            assert list(backend._sandboxes.values()) == [witness]
            began = time.monotonic()
            sandbox = await backend.start({}, SandboxLimits())
            assert (await sandbox.shell("echo fine")).output == b"fine\n"
            seen["start_s"] = time.monotonic() - began
            return report
        finally:
            await backend.close()

    report = asyncio.run(scenario())
    (fds, memory, children), (fds_then, memory_then, children_then) = seen["before"], seen["after"]
    with capsys.disabled():
        print(f"\n{report}; the fork server {seen['before']} -> {seen['after']}, then a start {seen['start_s']:.2f} s")
        for line in report.lost[:20]:
            print("   lost:", line[:200])
    report.check()
    assert fds_then == fds
    assert children_then == children, "processes of sandboxes that have ended"
    assert memory_then <= memory + 32 * 2**20
    assert seen["start_s"] < 5
