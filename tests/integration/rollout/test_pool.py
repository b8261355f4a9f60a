"""The pool in front of real bubblewrap sandboxes."""

import asyncio

from composer.contract import SandboxLimits
from composer.rollout.pool import PoolSettings, SandboxPool
from composer.rollout.pressure import PressureLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

ANY = PressureLimits(runnable_per_cpu=1e9, memory_bytes=0, disk_bytes=0)
LIMITS = SandboxLimits()


async def ready(pool: SandboxPool) -> None:
    """Wait until a sandbox is ready."""
    async with asyncio.timeout(30):
        while not any(kind.sandboxes for kind in pool._ready.values()):
            await asyncio.sleep(0.01)


def test_a_sandbox_that_was_ready_is_as_fresh_as_any() -> None:
    async def play() -> None:
        pool = SandboxPool(BubblewrapBackend("pool"), PoolSettings(warm=1, pressure=ANY))
        try:
            first = await pool.start({"mine.txt": b"1"}, LIMITS)
            await first.shell("echo secret > /tmp/left; export LEFT=1; cd /")
            await ready(pool)
            second = await pool.start({"src/mine.txt": b"2"}, LIMITS)
            assert pool.counts.warm_starts == 1
            result = await second.shell("pwd; find . -type f; ls /tmp; echo $LEFT")
            assert result.output.decode().split("\n") == ["/home/dev/project", "./src/mine.txt", "", ""]
            assert (await second.files()) == {"src/mine.txt": b"2"}
            fork = await second.fork()
            assert (await fork.read("src/mine.txt")) == b"2"
            for sandbox in (first, second, fork):
                await sandbox.stop()
        finally:
            await pool.close()

    asyncio.run(play())


def test_one_that_died_while_it_was_ready_is_replaced() -> None:
    async def play() -> None:
        pool = SandboxPool(BubblewrapBackend("pool"), PoolSettings(warm=1, pressure=ANY))
        try:
            await (await pool.start({}, LIMITS)).stop()
            await ready(pool)
            _, waiting = next(iter(pool._ready.values())).sandboxes[0]
            await waiting.stop()
            sandbox = await pool.start({"a": b"1"}, LIMITS)
            assert sandbox.id != waiting.id
            assert (await sandbox.shell("cat a")).output == b"1"
        finally:
            await pool.close()

    asyncio.run(play())


def test_closing_ends_those_that_are_ready() -> None:
    async def play() -> None:
        backend = BubblewrapBackend("pool")
        pool = SandboxPool(backend, PoolSettings(warm=3, pressure=ANY))
        await (await pool.start({}, LIMITS)).stop()
        await ready(pool)
        await pool.close()
        assert not backend._sandboxes

    asyncio.run(play())
