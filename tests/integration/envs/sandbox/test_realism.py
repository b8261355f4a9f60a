"""What a program in a sandbox sees of the machine, and how much of it gives the sandbox away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError
from envs.sandbox.bubblewrap import BubblewrapBackend
from tests.integration.envs.sandbox.host_tells import lacked_here

Run = Callable[[Awaitable[Any]], Any]
MOST_TELLS = 10
"""Of the 39 by which backends are compared, all of them counted: also `kernel`, which a virtual machine's may tell."""


def test_the_default_gives_little_away(backend: BubblewrapBackend, run: Run) -> None:
    findings = run(backend.audit())
    compared = [f for f in findings if f.required]
    assert len(compared) == 39
    shown = {f.name for f in compared if not f.ok}
    assert len(shown - lacked_here(findings)) <= MOST_TELLS, shown
    # What keeps the sandbox shut was not given up for that.
    assert {"no new privileges", "seccomp", "capabilities"} <= shown


def test_a_plain_one_shows_itself(run: Run) -> None:
    backend = BubblewrapBackend("plain", profile="plain", python=False)
    try:
        shown = {f.name for f in run(backend.audit()) if not f.ok}
    finally:
        run(backend.close())
    assert {"first process", "few processes", "no route", "machine id", "home", "kernel command line"} & shown
    assert len(shown) > 20


def test_the_machine_as_it_is_seen(backend: BubblewrapBackend, run: Run) -> None:
    async def look(command: str) -> list[str]:
        return (await sandbox.shell(command)).output.decode().splitlines()

    sandbox = run(backend.start({}, SandboxLimits()))
    try:
        assert run(look("cat /proc/1/comm /proc/2/comm; tr '\\0' ' ' < /proc/1/cmdline")) == [
            "systemd", "kthreadd", "/sbin/init ",
        ]  # fmt: skip
        up = float(run(look("cut -d' ' -f1 /proc/uptime"))[0])
        assert 2 <= up < 60
        assert run(look("awk 'NR==2{print $1, $3}' /proc/net/route")) == ["eth0 0202000A"]
        assert run(look("grep -c robin.weber ~/.gitconfig; hostname; whoami")) == ["1", "devbox", "dev"]
        assert "hypervisor" not in "".join(run(look("cat /proc/cpuinfo")))
        assert run(look("sudo true; echo $?"))[-1] == "1"
        # The crowd is scenery: nobody can look into it, and it does not count.
        assert run(look("cat /proc/2/mem /proc/2/environ 2>&1 | grep -c denied")) == ["2"]
        assert run(sandbox.stats()).num_processes == 1
    finally:
        run(sandbox.stop())


def test_killing_the_crowd_ends_nothing_else(backend: BubblewrapBackend, run: Run) -> None:
    sandbox = run(backend.start({}, SandboxLimits()))
    try:
        run(sandbox.exec(["sh", "-c", "kill -9 2 3; kill -STOP 4; kill -9 -1"]))
        assert run(sandbox.shell("echo alive")).output == b"alive\n"
    finally:
        run(sandbox.stop())


@pytest.mark.parametrize("most", [3, 20])
def test_the_crowd_does_not_use_up_the_limit(most: int, backend: BubblewrapBackend, run: Run) -> None:
    code = """import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(9)
        count += 1
except BlockingIOError:
    print(count)
"""

    async def example() -> int:
        sandbox = await backend.start({}, SandboxLimits(num_processes=most))
        try:
            return int((await sandbox.exec(["python3", "-c", code])).output)
        finally:
            await sandbox.stop()

    # The program itself is one; the persistent shell, which has not started, leaves room for another. Without control
    # groups, what bubblewrap needs for itself is not counted.
    assert run(example()) in (most, most + 1)


def test_a_probe_that_cannot_run_is_an_error(backend: BubblewrapBackend, run: Run) -> None:
    from envs.sandbox.realism.audit import audit

    async def example() -> None:
        sandbox = await backend.start({}, SandboxLimits())
        await sandbox.shell("sh() { exit 7; }")
        try:
            await asyncio.wait_for(audit(sandbox), 30)
        finally:
            await sandbox.stop()

    with pytest.raises(SandboxError, match="ended early"):
        run(example())
