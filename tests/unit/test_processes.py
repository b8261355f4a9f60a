"""What the driver asks of its actors, with a stand-in for the actor. Integration tests have real ones."""

import asyncio
from types import SimpleNamespace

import pytest

from composer.compose import compose
from composer.errors import CorpusError, LauncherError
from composer.processes import Rollouts


class Worker:
    """An env worker that records a session whenever it is asked how many there are, until `enough`."""

    def __init__(self, enough: int, failure: Exception | None = None) -> None:
        self.recorded, self.enough, self.failure = 0, enough, failure
        self.prepare = SimpleNamespace(remote=self._prepare)
        self.num_recorded = SimpleNamespace(remote=self._num_recorded)

    async def _prepare(self) -> None:
        while self.recorded < self.enough:
            await asyncio.sleep(0)
        if self.failure:
            raise self.failure

    async def _num_recorded(self) -> int:
        self.recorded += 1
        return self.recorded


async def prepare(worker: Worker, seen: list[int]) -> None:
    rollouts = Rollouts.__new__(Rollouts)
    rollouts.__dict__.update(workers=[worker], _config=compose())
    try:
        await rollouts.prepare(seen.append)
    finally:
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody goes on asking"


def test_progress_is_told_while_sessions_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = asyncio.sleep
    monkeypatch.setattr("composer.processes.asyncio.sleep", lambda seconds: pause(0))
    seen: list[int] = []
    asyncio.run(prepare(Worker(enough=3), seen))
    assert seen[:3] == [1, 2, 3]


def test_a_failure_comes_out_as_it_was_raised() -> None:
    with pytest.raises(CorpusError, match="empty"):
        asyncio.run(prepare(Worker(enough=1, failure=CorpusError("empty")), []))


def test_a_worker_that_died_is_told_once() -> None:
    worker = Worker(enough=0, failure=LauncherError("the env worker process died"))

    async def dead() -> int:
        raise LauncherError("the env worker process died")

    worker.num_recorded = SimpleNamespace(remote=dead)
    with pytest.raises(LauncherError, match="died"):
        asyncio.run(prepare(worker, []))


def test_an_interrupt_ends_it_at_once() -> None:
    async def interrupted() -> None:
        async with asyncio.timeout(0.05):
            await prepare(Worker(enough=1000), [])

    with pytest.raises(TimeoutError):
        asyncio.run(interrupted())
