"""What the driver asks of its actors, with a stand-in for the actor. Integration tests have real ones."""

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from composer.compose import compose
from composer.errors import ClusterError, ConfigError, CorpusError, LauncherError, PlanError, WeightSyncError
from composer.layout import Layout
from composer.process_logs import last_words
from composer.processes import Rollouts, Trainers
from composer.rollout.checkpoint import Keeping
from composer.types import Group, Split


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
    rollouts.__dict__.update(workers=[worker], _config=compose(), _names=["env-0"], _layout=Layout(Path("/nowhere")))
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


class GroupWorker:
    """Runs groups until it is dead."""

    def __init__(self) -> None:
        self.dead, self.asked = False, []
        self.run_group = SimpleNamespace(remote=self._run_group)

    async def _run_group(
        self, split: Split, index: int, group_id: str, size: int, temperature: float, keeping: Keeping
    ) -> Group:
        self.asked.append(group_id)
        await asyncio.sleep(0.01)
        if self.dead:
            raise LauncherError("the env worker process died")
        return Group(group_id, "t", [])


def test_a_dead_worker_is_left_out_and_its_groups_run_elsewhere(tmp_path: Path) -> None:
    workers, warnings = [GroupWorker(), GroupWorker()], []
    rollouts = Rollouts.__new__(Rollouts)
    rollouts.__dict__.update(
        workers=workers,
        _names=["env-0", "env-1"],
        _load=[0, 0],
        _dead={},
        _layout=Layout(tmp_path),
        _warn=warnings.append,
    )

    async def run(*names: str) -> list[Group]:
        return await asyncio.gather(*(rollouts.run_group(Split.TRAIN, 0, n, 2, 1.0, Keeping()) for n in names))

    asyncio.run(run("a", "b"))
    assert [len(w.asked) for w in workers] == [1, 1]
    workers[0].dead = True
    assert [g.id for g in asyncio.run(run("c", "d", "e", "f"))] == ["c", "d", "e", "f"]
    assert len(workers[0].asked) == 3 and len(workers[1].asked) == 5
    assert warnings == ["going on with 1 env workers of 2: the env worker process died"]
    asyncio.run(run("g"))
    assert len(workers[0].asked) == 3

    workers[1].dead = True
    path = last_words(tmp_path, "env-1")
    path.parent.mkdir()
    path.write_text("tool 'x' has blocked")
    for _ in range(2):
        with pytest.raises(LauncherError, match="^tool 'x' has blocked$"):
            asyncio.run(run("h"))


@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_an_error_with_parts_travels_from_an_actor(kind: type[ConfigError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a.b", 3, "mend it")))
    assert (type(error), error.key, error.value, str(error)) == (kind, "a.b", 3, "a.b=3: mend it")


class PublishingRank:
    """A trainer rank whose publication takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.publish = SimpleNamespace(remote=self._publish)

    async def _publish(self, version: int, probe: list[int]) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        return {"weight_sync/bytes": float(version)}


class Loading:
    """Generators that load at once."""

    async def load(self, version: int) -> dict[str, float]:
        return {"weight_sync/load_s": 0.5}


def trainers(*seconds: float, publish_timeout_s: float, step_timeout_s: float) -> Trainers:
    made = Trainers.__new__(Trainers)
    made.__dict__.update(
        ranks=[PublishingRank(s) for s in seconds],
        _sync=Loading(),
        _publish_timeout_s=publish_timeout_s,
        _timeout_s=step_timeout_s,
    )
    return made


def test_a_publication_has_the_deadline_of_weight_sync() -> None:
    hanging = trainers(0.0, 30.0, publish_timeout_s=0.05, step_timeout_s=600.0)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.timeout_s=0\.05: version 7 was not published by then"):
        asyncio.run(hanging.synchronise(7, [1, 2]))


def test_a_publication_is_not_bounded_by_the_deadline_of_a_step() -> None:
    slow = trainers(0.1, publish_timeout_s=60.0, step_timeout_s=0.01)
    assert asyncio.run(slow.synchronise(3, [1, 2])) == {"weight_sync/bytes": 3.0, "weight_sync/load_s": 0.5}


def test_an_actor_that_dies_with_ray_is_no_lost_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ray_has_ended() -> ClusterError:
        return ClusterError("Ray's node manager (raylet, SIGKILL) ended under the run")

    class Dead(GroupWorker):
        async def _run_group(self, *arguments: object) -> Group:
            raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr("composer.cluster.cause_of_death", ray_has_ended)
    rollouts, warnings = Rollouts.__new__(Rollouts), []
    rollouts.__dict__.update(
        workers=[Dead(), Dead()],
        _names=["env-0", "env-1"],
        _load=[0, 0],
        _dead={},
        _layout=Layout(tmp_path),
        _warn=warnings.append,
    )
    with pytest.raises(ClusterError, match="^Ray's node manager"):
        asyncio.run(rollouts.run_group(Split.TRAIN, 0, "g", 2, 1.0, Keeping()))
    assert not warnings


class ScoringRank:
    """Scores token t as -t; only rank 0 answers."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, []
        self.reference_score = SimpleNamespace(remote=self._score)

    async def _score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        self.seen.append(sequences)
        return [] if self.rank else [-s[1:].astype(np.float32) for s in sequences]


def test_sequences_go_to_all_ranks_in_one_piece_and_scores_come_back_as_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[object] = []
    monkeypatch.setattr("composer.processes.ray.put", lambda value: stored.append(value) or value)
    made = Trainers.__new__(Trainers)
    ranks = [ScoringRank(0), ScoringRank(1)]
    made.__dict__.update(ranks=ranks, _timeout_s=60.0)
    scores = asyncio.run(made.reference_score([[5, 1, 2], [7, 3]]))
    assert scores == [[-1.0, -2.0], [-3.0]] and type(scores[0][0]) is float
    assert len(stored) == 1 and all(rank.seen == [stored[0]] for rank in ranks)
