"""How fast bubblewrap sandboxes are, with limits and seccomp on, beside SWE-ReX's local deployment, which isolates
nothing: whole cycles (start, a command, stop), commands, and forks. In turn, in one run; without SWE-ReX beside bash.
"""

import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from envs.sandbox.bubblewrap import BubblewrapBackend

WIDE, CYCLES, COMMANDS, FORKS = 8, 240, 300, 40
LEAST_CYCLES_PER_S, MOST_ROUND_TRIP_S, MOST_FORK_S = 120, 0.002, 0.015
COMMAND = "ls"


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


async def ours() -> dict[str, float]:
    backend = BubblewrapBackend("speed")
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
    """SWE-ReX on the same commands; None where it is not installed."""
    try:
        from swerex.deployment.local import LocalDeployment
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    except ImportError:
        return None
    logging.getLogger("rex-deploy").setLevel(logging.CRITICAL)

    async def start() -> LocalDeployment:
        while True:  # its session gives up after a second, which a busy machine takes
            deployment = LocalDeployment()
            await deployment.start()
            with contextlib.suppress(Exception):
                await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=5))
                return deployment
            await deployment.stop()

    async def run(deployment: LocalDeployment, command: str) -> None:
        await deployment.runtime.run_in_session(BashAction(command=command, check="silent"))

    async def cycle() -> None:
        deployment = await start()
        await run(deployment, "true")
        await deployment.stop()

    numbers = {"cycles/s": await side_by_side(WIDE, 4 * WIDE, cycle)}
    deployment = await start()
    numbers["round trip"] = await median_s(20, lambda: run(deployment, COMMAND))
    await deployment.stop()
    return numbers


def bare() -> dict[str, float]:
    """A bash for each cycle, and one program for each command: what any sandbox costs at least without one."""

    def once(*argv: str) -> float:
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    cycles = [once("bash", "-c", "true") for _ in range(50)]
    return {"cycles/s": 1 / statistics.median(cycles), "round trip": statistics.median(once("ls") for _ in range(50))}


@pytest.mark.timeout(300)
def test_cycles_commands_and_forks(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        mine = asyncio.run(ours())
    except SandboxStartError as error:
        pytest.skip(f"no sandbox starts on this machine: {error}")
    other = asyncio.run(theirs())
    name, numbers = ("SWE-ReX, unisolated", other) if other else ("bash, unisolated", bare())
    with capsys.disabled():
        print(
            f"\nsandboxes, {WIDE} wide: {mine['cycles/s']:.0f} cycles/s ({name}: {numbers['cycles/s']:.1f}); "
            f"`{COMMAND}` {1e3 * mine['round trip']:.2f} ms ({1e3 * numbers['round trip']:.2f}); "
            f"fork {1e3 * mine['fork']:.1f} ms",
            file=sys.stdout,
        )
    if other:
        assert mine["cycles/s"] > 5 * other["cycles/s"]
        assert mine["round trip"] < other["round trip"] / 10
    assert mine["fork"] < 3 / mine["cycles/s"] * WIDE
