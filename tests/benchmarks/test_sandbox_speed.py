"""How fast bubblewrap sandboxes are, limits and seccomp on: whole cycles (start, a command, stop), commands, forks.

Beside two others, in turn, in one run: SWE-ReX's local deployment, which isolates nothing, on the same commands; and a
bare bwrap with the same namespaces, without limits, seccomp, overlay, shell and supervisor, which is what one pays at
least. The ratios are asserted; the rates on two idle cores that are aimed at are printed beside what was measured.
"""

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.machine import bwrap_path

WIDE, CYCLES, COMMANDS, FORKS = 8, 240, 300, 40
AIMS = {"cycles/s": 120, "round trip": 0.002, "fork": 0.015}
"""On two idle cores: cycles a second 8 wide, and seconds at the median of a command and of a fork."""
COMMAND = "ls"
THEIR_S, THEIR_TRIES = 100.0, 5
"""For SWE-ReX: in all, and at a session."""
BARE = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]


async def side_by_side(width: int, num: int, work: Callable[[], Awaitable[None]]) -> float:
    """Times a second that `work` was done, `width` at a time."""
    left = iter(range(num))

    async def worker() -> None:
        for _ in left:
            await work()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(width)))
    return num / (time.perf_counter() - began)


async def median_s(num: int, work: Callable[[], Awaitable[None]]) -> float:
    """Seconds of one, in the middle of all."""
    seconds = []
    for _ in range(num):
        began = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def ours(profile: str) -> dict[str, float]:
    backend = BubblewrapBackend("speed", profile=profile)
    limits = SandboxLimits()
    try:

        async def cycle() -> None:
            sandbox = await backend.start({}, limits)
            assert (await sandbox.shell("true")).exit_code == 0
            await sandbox.stop()

        await side_by_side(WIDE, 2 * WIDE, cycle)  # warms up
        numbers = {"cycles/s": await side_by_side(WIDE, CYCLES, cycle)}
        sandbox = await backend.start({f"src/{i}.py": b"x = 1\n" * 40 for i in range(20)}, limits)

        async def command() -> None:
            assert (await sandbox.shell(COMMAND)).exit_code == 0

        async def fork() -> None:
            await (await sandbox.fork()).stop()

        async def begin() -> None:
            begun.append(await sandbox.fork())

        numbers["round trip"] = await median_s(COMMANDS, command)
        begun = []
        numbers["fork"] = await median_s(FORKS, begin)
        await asyncio.gather(*(child.stop() for child in begun))
        return numbers
    finally:
        await backend.close()


async def theirs() -> dict[str, float] | None:
    """SWE-ReX on the same commands; None where it is not installed, or does not get anywhere on this machine."""
    try:
        from swerex.deployment.local import LocalDeployment
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    except ImportError:
        return None
    logging.getLogger("rex-deploy").setLevel(logging.CRITICAL)

    async def start() -> LocalDeployment:
        for _ in range(THEIR_TRIES):  # its session gives up after a second, which a busy machine takes
            deployment = LocalDeployment()
            await deployment.start()
            with contextlib.suppress(Exception):
                await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=5))
                return deployment
            await deployment.stop()
        raise TimeoutError

    async def run(deployment: LocalDeployment, command: str) -> None:
        await deployment.runtime.run_in_session(BashAction(command=command, check="silent"))

    async def cycle() -> None:
        deployment = await start()
        await run(deployment, "true")
        await deployment.stop()

    try:
        async with asyncio.timeout(THEIR_S):
            numbers = {"cycles/s": await side_by_side(WIDE, 2 * WIDE, cycle)}
            deployment = await start()
            numbers["round trip"] = await median_s(20, lambda: run(deployment, COMMAND))
            await deployment.stop()
    except TimeoutError:
        return None
    return numbers


async def bare() -> float:
    """Cycles a second of nothing but bwrap around a bash that does nothing."""

    async def cycle() -> None:
        process = await asyncio.create_subprocess_exec(str(bwrap_path()), *BARE, "bash", "-c", "true")
        assert await process.wait() == 0

    return await side_by_side(WIDE, CYCLES, cycle)


@pytest.mark.timeout(300)
def test_cycles_commands_and_forks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = {profile: asyncio.run(ours(profile)) for profile in ("plain", "developer")}
    least = asyncio.run(bare())
    monkeypatch.setenv("HOME", str(tmp_path))  # without what this user has their shells do first
    other = asyncio.run(theirs())
    with capsys.disabled():
        print(f"\nsandboxes, {WIDE} wide; on two idle cores: {shown(AIMS)}")
        for profile, numbers in mine.items():
            print(f"  profile {profile}: {shown(numbers)}")
        print(f"  bwrap alone: {least:.0f} cycles/s")
        print(f"  SWE-ReX, unisolated: {shown(other) if other else 'not measured'}")
    for numbers in mine.values():
        assert numbers["cycles/s"] > least / 5
        if other:
            assert numbers["cycles/s"] > 5 * other["cycles/s"]
            assert numbers["round trip"] < other["round trip"] / 10
        assert numbers["fork"] < 3 / numbers["cycles/s"] * WIDE


def shown(numbers: dict[str, float]) -> str:
    fork = f", fork {1e3 * numbers['fork']:.1f} ms" if "fork" in numbers else ""
    return f"{numbers['cycles/s']:.1f} cycles/s, `{COMMAND}` {1e3 * numbers['round trip']:.2f} ms{fork}"
