"""The pool's decisions, in front of a stand-in for a backend; with real sandboxes: integration/rollout/test_pool.py."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, cast

import pytest

from composer.contract import SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError
from composer.rollout.deadline import Deadline
from composer.rollout.pool import PoolSettings, SandboxPool, together
from composer.rollout.pressure import PressureLimits, over, read
from composer.types import Pressure

LIMITS = SandboxLimits(memory_bytes=2**30)
FREE = Pressure(0.0, 2**34, 2**34)
FULL = Pressure(99.0, 2**34, 2**34)


class Box:
    """Stands for a sandbox."""

    def __init__(self, id: str, files: Mapping[str, bytes]) -> None:
        self.id, self.content, self.stopped, self.has_ended = id, dict(files), 0, False

    async def stats(self) -> None:
        if self.has_ended:
            raise SandboxError("it has ended")

    async def write(self, path: str, content: bytes) -> None:
        if path == "forbidden":
            raise PermissionError(13, "Permission denied", path)
        self.content[path] = content

    async def fork(self) -> "Box":
        return Box(f"{self.id}-fork", self.content)

    async def stop(self) -> None:
        self.stopped += 1


class Backend:
    """Stands for a backend."""

    def __init__(self) -> None:
        self.started: list[tuple[Box, SandboxLimits, str]] = []
        self.closed = False

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Box:
        box = Box(str(len(self.started)), files)
        self.started.append((box, limits, image))
        return box

    async def close(self) -> None:
        self.closed = True


def make(backend: Any, pressure: Pressure = FREE, **settings: Any) -> tuple[SandboxPool, SimpleNamespace]:
    dial = SimpleNamespace(pressure=pressure)
    return SandboxPool(backend, PoolSettings(**settings), lambda: dial.pressure), dial


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_second_start_of_a_kind_takes_a_sandbox_that_was_ready() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=2, idle_s=60.0)
        first = await pool.start({"a": b"1"}, LIMITS)
        await settle()
        assert [box.content for box, _, _ in backend.started] == [{"a": b"1"}, {}, {}]
        second: Any = await pool.start({"b": b"2"}, LIMITS)
        assert (second.id, second.content) == ("1", {"b": b"2"})
        await settle()
        assert len(backend.started) == 4  # two are ready again
        assert (pool.counts.cold_starts, pool.counts.warm_starts) == (1, 1)
        # One that was ready lives for as long as it is promised to, from when it is taken.
        assert [limits.lifetime_s for _, limits, _ in backend.started] == [600.0, 660.0, 660.0, 660.0]
        await first.stop()
        await pool.close()
        assert [box.stopped for box, _, _ in backend.started] == [1, 0, 1, 1]  # whoever holds the second stops it
        assert backend.closed

    asyncio.run(play())


def test_other_limits_other_images_and_snapshots_are_other_kinds() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=1)
        await pool.start({}, LIMITS)
        await settle()
        await pool.start({}, SandboxLimits(memory_bytes=2**29))
        await pool.start({}, LIMITS, image="debian")
        await pool.start({}, LIMITS, base=Snapshot("s"))
        assert pool.counts.warm_starts == 0
        await settle()
        assert [(limits.memory_bytes, image) for _, limits, image in backend.started] == [
            *((2**30, ""), (2**30, ""), (2**29, ""), (2**30, "debian"), (2**30, "")),
            *((2**29, ""), (2**30, "debian")),
        ]
        await pool.close()

    asyncio.run(play())


def test_one_that_has_ended_while_it_waited_is_passed_over() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=1)
        await pool.start({}, LIMITS)
        await settle()
        backend.started[1][0].has_ended = True
        sandbox: Any = await pool.start({"a": b"1"}, LIMITS)
        assert sandbox.id == "2"
        assert backend.started[1][0].stopped == 1
        await pool.close()

    asyncio.run(play())


def test_a_file_that_cannot_be_written_is_an_error_as_in_a_fresh_sandbox() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=1)
        await (await pool.start({}, LIMITS)).stop()
        await settle()
        with pytest.raises(SandboxStartError, match="'forbidden' cannot be written: Permission denied"):
            await pool.start({"forbidden": b""}, LIMITS)
        assert backend.started[1][0].stopped == 1
        await pool.close()

    asyncio.run(play())


def test_sandboxes_that_nobody_takes_are_stopped() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=2, idle_s=0.1)
        await (await pool.start({}, LIMITS)).stop()
        await asyncio.sleep(0.4)
        assert [box.stopped for box, _, _ in backend.started][:3] == [1, 1, 1]
        assert all(box.stopped == 1 for box, _, _ in backend.started)
        await pool.close()

    asyncio.run(play())


def test_only_the_kinds_asked_for_last_are_kept_ready() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=1)
        for number in range(5):
            await pool.start({}, LIMITS, image=f"image-{number}")
            await settle()
        ready = [box for box, _, image in backend.started if not box.stopped and image == "image-0"]
        assert len(ready) == 1  # the one that somebody has
        await pool.close()

    asyncio.run(play())


def test_a_start_waits_for_the_pressure_to_fall_but_for_the_only_one() -> None:
    async def play() -> None:
        backend = Backend()
        pool, dial = make(backend, FULL, warm=0)
        first = await asyncio.wait_for(pool.start({}, LIMITS), 5)
        waiting = [asyncio.ensure_future(pool.start({str(i): b""}, LIMITS)) for i in range(2)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        dial.pressure = FREE
        boxes: list[Any] = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert [list(box.content) for box in boxes] == [["0"], ["1"]]  # first come, first served
        assert pool.counts.waits == 2
        assert pool.counts.waited_s >= 0.2
        await first.stop()
        await pool.close()

    asyncio.run(play())


def test_when_the_last_one_stops_the_next_is_let_in() -> None:
    async def play() -> None:
        pool, _ = make(Backend(), FULL, warm=0)
        first = await pool.start({}, LIMITS)
        waiting = asyncio.ensure_future(pool.start({}, LIMITS))
        await asyncio.sleep(0.12)
        assert not waiting.done()
        await first.stop()
        await first.stop()  # counts once
        await asyncio.wait_for(waiting, 5)
        third = asyncio.ensure_future(pool.start({}, LIMITS))
        await asyncio.sleep(0.12)
        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        await pool.close()

    asyncio.run(play())


def test_a_start_that_waits_for_too_long_says_what_is_short() -> None:
    async def play() -> None:
        pool, _ = make(Backend(), FULL, warm=0, wait_s=0.1)
        await pool.start({}, LIMITS)
        with pytest.raises(SandboxStartError, match=r"99\.0 runnable threads a CPU, of at most 16.*env\.concurrency"):
            await pool.start({}, LIMITS)
        await pool.close()

    asyncio.run(play())


def test_memory_that_new_sandboxes_have_not_taken_yet_counts() -> None:
    async def play() -> None:
        # An eighth of 1 GiB each: after two of them, less than the floor of 1 GiB is left of 1.2 GiB.
        pool, _ = make(Backend(), Pressure(0.0, int(1.2 * 2**30), 2**40), warm=0, wait_s=0.1)
        await pool.start({}, LIMITS)
        await pool.start({}, LIMITS)
        with pytest.raises(SandboxStartError, match=r"0\.9 GiB of memory left, of at least 1\.0"):
            await pool.start({}, LIMITS)
        await pool.close()

    asyncio.run(play())


def test_nothing_is_made_ready_under_pressure() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, FULL, warm=2)
        await pool.start({}, LIMITS)
        await settle()
        assert len(backend.started) == 1
        await pool.close()

    asyncio.run(play())


def test_a_fork_counts_as_running() -> None:
    async def play() -> None:
        pool, _ = make(Backend(), FULL, warm=0)
        first = await pool.start({}, LIMITS)
        second = await first.fork()
        await first.stop()
        waiting = asyncio.ensure_future(pool.start({}, LIMITS))
        await asyncio.sleep(0.12)
        assert not waiting.done()
        await second.stop()
        await asyncio.wait_for(waiting, 5)
        await pool.close()

    asyncio.run(play())


def test_whoever_holds_one_does_not_wait_for_another() -> None:
    async def play() -> None:
        pool, dial = make(Backend(), warm=0)

        async def pair(pause_s: float) -> None:
            with together():
                first = await pool.start({}, LIMITS)
                await asyncio.sleep(pause_s)
                second = await pool.start({}, LIMITS)
            await first.stop()
            await second.stop()

        async def at_once() -> None:
            with together():
                for sandbox in await asyncio.gather(*(pool.start({}, LIMITS) for _ in range(3))):
                    await sandbox.stop()

        dial.pressure = FULL
        # Two that each hold one, and others ahead of them in the queue: only as one of them has its second, it ends.
        await asyncio.wait_for(asyncio.gather(pair(0.2), pair(0.2), at_once(), at_once(), pair(0.2)), 10)
        first = await pool.start({}, LIMITS)  # what has ended is forgotten
        waiting = asyncio.ensure_future(pool.start({}, LIMITS))
        await asyncio.sleep(0.12)
        assert not waiting.done()
        await first.stop()
        await (await waiting).stop()
        await pool.close()

    asyncio.run(play())


def test_the_wait_for_room_does_not_count() -> None:
    async def play() -> None:
        pool, dial = make(Backend(), FULL, warm=0)
        first = await pool.start({}, LIMITS)

        async def graded() -> float:
            async with Deadline(0.2) as deadline:
                await pool.start({}, LIMITS)
            return deadline.left_s

        waiting = asyncio.ensure_future(graded())
        await asyncio.sleep(0.5)
        dial.pressure = FREE
        assert await waiting > 0
        await first.stop()
        await pool.close()

    asyncio.run(play())


def test_the_keeper_cleans_up_while_others_take() -> None:
    """Stopping takes time, in which the next start finds what is left; and in which it is cancelled once more."""

    class Slow(Box):
        async def stop(self) -> None:
            await asyncio.sleep(0.05)
            self.stopped += 1

    class SlowBackend(Backend):
        async def start(self, files: Mapping[str, bytes], limits: SandboxLimits, **more: Any) -> Box:
            await super().start(files, limits, **more)
            box = Slow(str(len(self.started)), files)
            self.started[-1] = (box, *self.started[-1][1:])
            return box

    async def play() -> None:
        backend = SlowBackend()
        pool, _ = make(backend, warm=4)
        held = [await pool.start({}, LIMITS)]
        await settle()
        [ready] = pool._ready.values()
        assert ready.keeper is not None
        ready.keeper.cancel()
        await asyncio.sleep(0.01)
        held += [await pool.start({}, LIMITS) for _ in range(2)]
        ready.keeper.cancel()
        await asyncio.gather(ready.keeper, return_exceptions=True)
        await settle()
        assert [box.stopped for box, _, _ in backend.started[1:5]] == [1, 1, 1, 1]  # all that waited, each once
        assert len({id(sandbox._sandbox) for sandbox in held} & {id(box) for box, _, _ in backend.started[1:5]}) == 0
        assert [len(kind.sandboxes) for kind in pool._ready.values()] == [4]  # another keeper has begun
        for sandbox in held:
            await sandbox.stop()
        await pool.close()
        assert [box.stopped for box, _, _ in backend.started] == [1] * len(backend.started)

    asyncio.run(play())


def test_a_pool_that_was_closed_before_its_keeper_began_keeps_again() -> None:
    async def play() -> None:
        backend = Backend()
        pool, _ = make(backend, warm=1)
        await (await pool.start({}, LIMITS)).stop()
        await pool.close()
        await (await pool.start({}, LIMITS)).stop()
        await settle()
        assert len(backend.started) == 3
        await pool.close()

    asyncio.run(play())


def test_the_pressure_is_of_the_machine_where_the_sandboxes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Backend):
        now: Pressure | None = FULL

        async def pressure(self) -> Pressure | None:
            return self.now

    async def play() -> None:
        monkeypatch.setattr("composer.rollout.pressure.read", lambda: FULL)
        backend = Elsewhere()
        pool = SandboxPool(cast("Any", backend), PoolSettings(warm=0, wait_s=0.1))
        await pool.start({}, LIMITS)
        with pytest.raises(SandboxStartError, match="99.0 runnable"):
            await pool.start({}, LIMITS)
        backend.now = Pressure(None, None, None)  # nothing is known: this machine's own is still another's
        await pool.start({}, LIMITS)
        backend.now = None  # it is here
        with pytest.raises(SandboxStartError, match="99.0 runnable"):
            await pool.start({}, LIMITS)
        await pool.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("pressure", "reserved", "expected"),
    [
        (Pressure(2.0, 100, 100), 0, ""),
        (Pressure(2.1, 100, 100), 0, "2.1 runnable threads a CPU, of at most 2"),
        (Pressure(0.0, 2**30, 100), 2**30, "0.0 GiB of memory left, of at least 0.0"),
        (Pressure(0.0, 100, 9), 0, "0.0 GiB of disk left, of at least 0.0"),
        (Pressure(None, None, None), 2**40, ""),
    ],
)
def test_pressure_is_over_a_limit_or_not(pressure: Pressure, reserved: int, expected: str) -> None:
    assert over(pressure, PressureLimits(2.0, 10, 10), reserved) == expected


def test_the_reading_is_the_machines() -> None:
    now = read()
    assert now.runnable_per_cpu and now.runnable_per_cpu > 0  # this very thread
    assert now.memory_bytes and now.memory_bytes > 2**20
    assert now.disk_bytes and now.disk_bytes > 0


def test_each_env_worker_looks_at_the_machine_that_it_runs_on() -> None:
    """Workers on two nodes are two processes, each with a pool; here they differ by where their temporary files lie."""
    code = """
import asyncio
import os
import shutil
import subprocess
import sys
from composer.rollout.pool import PoolSettings, SandboxPool
print(asyncio.run(SandboxPool(None, PoolSettings())._pressure()).disk_bytes)
"""
    workers = {
        folder: subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": folder}, stdout=PIPE)
        for folder in ("/dev/shm", "/tmp")
    }
    for folder, worker in workers.items():
        said = int(worker.communicate(timeout=120)[0])
        assert said == pytest.approx(shutil.disk_usage(folder).free, rel=0.1, abs=2**28)
