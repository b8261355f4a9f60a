"""The controller's promises: staleness bound, no task twice, failures dropped and counted, exact resuming.

`StandInRollouts` and `StandInPolicy` stand in for processes; the loop, the ledger and the packing are the real ones.
"""

import asyncio
import json

import pytest

from composer.errors import ClusterError, GeneratorError, LauncherError, TrainingError
from composer.rl.controller import Controller
from composer.rl.ledger import Ledger, read_ledger
from composer.rollout.checkpoint import Keeping
from composer.schema import AlgorithmConfig
from composer.types import Generation, Group, Outcome, Trajectory, Turn


class StandInPolicy:
    num_data_ranks = 1
    sequence_multiple = 1

    def __init__(self, version=0, fail_at=None):
        self.version, self.fail_at, self.saved, self.trained = version, fail_at, [], []

    async def update(self, rows):
        await asyncio.sleep(0.002)
        if self.version + 1 == self.fail_at:
            raise GeneratorError("stand-in failure")
        self.trained.append(sorted({int(t) for r in rows[0] for t in r.tokens.flatten() if t >= 100}))
        self.version += 1
        return {"loss": 0.0, "grad_norm": 1.0}

    async def synchronise(self, version, probe):
        assert version == self.version
        return {"mismatch/max": 0.0}

    async def save(self):
        self.saved.append(self.version)


class StandInRollouts:
    def __init__(self, policy, broken=(), stuck=(), reward=None):
        self.policy, self.broken, self.stuck, self.reward, self.started = policy, broken, stuck, reward, []

    async def run_group(self, split, index, group_id, size, temperature, keeping):
        self.started.append(index)
        version = self.policy.version
        await asyncio.sleep(0.001 * (1 + index % 3))
        if index in self.stuck:
            await asyncio.sleep(60)
        lost = index in self.broken
        turn = Turn([100 + index], Generation([1, 2], [-0.1, -0.1], [version, version], "stop"))
        outcome = Outcome.INFRASTRUCTURE_ERROR if lost else Outcome.FINISHED
        episodes = [
            Trajectory(f"t{index}", group_id, f"{group_id}/{i}", [turn], [], outcome, None if lost else reward)
            for i, reward in enumerate([float(i % 2) if self.reward is None else self.reward for i in range(size)])
        ]
        return Group(group_id, f"t{index}", episodes)


def run(path, policy, rollouts, num_steps=6, staleness=1, keeping=Keeping(), **kwargs):  # noqa: B008 - frozen
    algorithm = AlgorithmConfig(
        name="t",
        num_steps=num_steps,
        learning_rate=1.0,
        groups_per_step=2,
        group_size=2,
        max_staleness=staleness,
        checkpoint_every=2,
        **kwargs,
    )
    steps, warnings = [], []
    state = read_ledger(path, {policy.version: path.parent} if policy.version else {})
    ledger = Ledger(path)
    if policy.version:
        ledger.rollback(policy.version)
    controller = Controller(
        algorithm, rollouts, policy, ledger, state, policy.version, 0, steps.append, warnings.append, keeping
    )
    try:
        asyncio.run(controller.run())
    finally:
        ledger.close()
    return steps, warnings


def trained_tasks(path):
    trained = {}
    for event in map(json.loads, path.read_text().splitlines()):
        if event["event"] == "step":
            trained[event["step"]] = event["groups"]
        elif event["event"] == "rollback":
            trained = {s: g for s, g in trained.items() if s <= event["step"]}
    return [g for groups in trained.values() for g in groups]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_sample_is_staler_than_the_bound_and_nothing_is_started_in_vain(tmp_path, staleness):
    policy = StandInPolicy()
    rollouts = StandInRollouts(policy)
    steps, _ = run(tmp_path / "l", policy, rollouts, num_steps=8, staleness=staleness)
    assert [s.step for s in steps] == list(range(1, 9))
    assert max(s.metrics["staleness/max"] for s in steps) <= staleness
    overtaken = int(steps[-1].metrics["groups/dropped"])  # a slow one can get too old before its turn
    assert sorted(rollouts.started) == list(range(16 + overtaken))
    assert policy.saved == [2, 4, 6, 8]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_standstill_is_said_once(tmp_path, reward):
    policy = StandInPolicy()
    steps, warnings = run(tmp_path / "l", policy, StandInRollouts(policy, reward=reward), num_steps=12)
    assert len(steps) == 12 and len(warnings) == 1
    assert "nothing is learnt any more: in the last 5 steps" in warnings[0] and f"mean is {reward:.3g})" in warnings[0]


def test_asynchronous_rollouts_do_go_stale(tmp_path):
    policy = StandInPolicy()
    steps, _ = run(tmp_path / "l", policy, StandInRollouts(policy), num_steps=8, staleness=1)
    assert max(s.metrics["staleness/max"] for s in steps) == 1


def test_a_group_lost_to_infrastructure_is_replaced_and_never_trained(tmp_path):
    policy = StandInPolicy()
    steps, warnings = run(tmp_path / "l", policy, StandInRollouts(policy, broken={1, 5}))
    assert len(steps) == 6 and steps[-1].metrics["groups/dropped"] == 2
    assert "g1" not in trained_tasks(tmp_path / "l") and len(warnings) == 2


def test_a_stuck_group_is_dropped_at_its_deadline(tmp_path):
    policy = StandInPolicy()
    steps, warnings = run(tmp_path / "l", policy, StandInRollouts(policy, stuck={0}), group_timeout_s=0.1)
    assert len(steps) == 6 and "not finished" in warnings[0]


def test_group_after_group_failing_ends_the_run_with_the_cause(tmp_path):
    policy = StandInPolicy()
    with pytest.raises(TrainingError, match="groups in a row failed"):
        run(tmp_path / "l", policy, StandInRollouts(policy, broken=set(range(1000))))


def test_without_an_env_worker_the_run_ends_at_once(tmp_path):
    class Dead(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            self.started.append(index)
            raise LauncherError("the env worker process died")

    rollouts = Dead(StandInPolicy())
    with pytest.raises(LauncherError, match="env worker process died"):
        run(tmp_path / "l", StandInPolicy(), rollouts)
    assert len(rollouts.started) <= 4


def test_tasks_that_leave_no_room_to_answer_end_the_run_with_the_key_to_change(tmp_path):
    class Full(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            episodes = [Trajectory("big", group_id, str(i), [], [], Outcome.CONTEXT_FULL, 0.0) for i in range(size)]
            return Group(group_id, "big", episodes)

    with pytest.raises(TrainingError, match=r"task big leaves no room .*generator\.max_model_len"):
        run(tmp_path / "l", StandInPolicy(), Full(StandInPolicy()))


def test_a_group_that_lost_a_few_episodes_is_trained_and_the_cause_is_told_but_not_for_ever(tmp_path):
    class Lossy(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            group = await super().run_group(split, index, group_id, size + 1, temperature, keeping)
            lost = group.trajectories[0]
            lost.outcome, lost.reward, lost.error = Outcome.INFRASTRUCTURE_ERROR, None, "tool 'x' failed"
            return group

    policy = StandInPolicy()
    steps, warnings = run(tmp_path / "l", policy, Lossy(policy))
    assert len(steps) == 6 and len(warnings) == 3
    assert warnings[0].startswith("1 episodes of group g") and warnings[0].endswith("tool 'x' failed")


def test_groups_without_a_difference_are_trained_and_counted(tmp_path):
    class Equal(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            group = await super().run_group(split, index, group_id, size, temperature, keeping)
            for t in group.trajectories:
                t.reward = float(index % 2)  # all wrong, or all right
            return group

    policy = StandInPolicy()
    steps, warnings = run(tmp_path / "l", policy, Equal(policy), num_steps=4)
    assert len(steps) == 4 and not warnings
    assert {s.metrics["reward/zero_variance_share"] for s in steps} == {1.0}


def test_resumed_twice_it_trains_every_step_once_and_no_task_twice(tmp_path):
    path = tmp_path / "l"
    trained = []
    for start, fail_at in ((0, 4), (2, 6), (4, None)):
        policy = StandInPolicy(start, fail_at)
        if fail_at is None:
            steps, _ = run(path, policy, StandInRollouts(policy), num_steps=8)
        else:
            with pytest.raises(GeneratorError):
                run(path, policy, StandInRollouts(policy), num_steps=8)
        trained.append(policy.trained)
    assert [s.step for s in steps] == [5, 6, 7, 8]
    tasks = trained_tasks(path)
    assert len(tasks) == len(set(tasks)) == 16
    # step 3 was done before the first failure, after the last checkpoint: it is done again with the same tasks
    assert trained[1][0] == trained[0][2]


def test_the_last_lost_step_is_repeated_without_sampling(tmp_path):
    path = tmp_path / "l"
    policy = StandInPolicy()
    run(path, policy, StandInRollouts(policy), num_steps=3)
    policy = StandInPolicy(version=2)
    rollouts = StandInRollouts(policy)
    run(path, policy, rollouts, num_steps=3)
    assert rollouts.started == []


def test_a_bug_in_the_rollouts_ends_the_run_instead_of_being_met_again_and_again(tmp_path):
    class Buggy(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            self.started.append(index)
            raise KeyError("not a failure of an episode")

    rollouts = Buggy(StandInPolicy())
    with pytest.raises(KeyError, match="not a failure"):
        run(tmp_path / "l", StandInPolicy(), rollouts)
    assert len(rollouts.started) <= 8


class KilledRollouts(StandInRollouts):
    """The run ends when a group of `last` begins; `asked` holds what each group was to be run with."""

    def __init__(self, policy, last=(), **kwargs):
        super().__init__(policy, **kwargs)
        self.last, self.asked = last, {}

    async def run_group(self, split, index, group_id, size, temperature, keeping):
        self.asked[group_id] = keeping
        if index in self.last:
            raise LauncherError("the env worker process died")
        return await super().run_group(split, index, group_id, size, temperature, keeping)


def killed(path, policy, rollouts, **kwargs):
    with pytest.raises(LauncherError):
        run(path, policy, rollouts, **kwargs)


def events(path, *kinds):
    return [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] in kinds]


def test_groups_that_were_started_are_the_first_ones_of_the_next_start(tmp_path):
    path = tmp_path / "l"
    killed(path, StandInPolicy(), KilledRollouts(StandInPolicy(), last={3}), num_steps=3)
    begun = [e["group"] for e in events(path, "start")]
    unfinished = [g for g in begun if g not in [e["group"] for e in events(path, "group")]]
    assert unfinished and begun == ["g0", "g1", "g2", "g3"][: len(begun)]
    policy = StandInPolicy()
    rollouts = StandInRollouts(policy)
    steps, warnings = run(path, policy, rollouts, num_steps=3)
    again = events(path, "start", "restart")[len(begun) :]
    assert [(e["event"], e["group"]) for e in again[: len(unfinished)]] == [("restart", g) for g in unfinished]
    assert {e["event"] for e in again[len(unfinished) :]} == {"start"}
    assert rollouts.started[: len(unfinished)] == [int(g[1:]) for g in unfinished]
    # None is lost, and none is trained twice.
    assert sorted(trained_tasks(path)) == [f"g{i}" for i in range(6)] and not warnings
    assert len(steps) == 3 and steps[-1].metrics["groups/dropped"] == 0


def test_groups_go_on_from_no_older_weights_than_they_could_be_trained_with(tmp_path):
    path = tmp_path / "l"
    ledger = Ledger(path)
    for i in range(5, 9):
        ledger.start(f"g{i}", i, 2)
    ledger.close()
    policy = StandInPolicy(version=3)
    path.write_text("".join(f'{{"event":"step","step":{s},"groups":[]}}\n' for s in (1, 2, 3)) + path.read_text())
    rollouts = KilledRollouts(policy)
    run(path, policy, rollouts, num_steps=5, staleness=1)
    # Version 3, two groups a step, at most one version between: the third and fourth are taken by version 4.
    assert [rollouts.asked[g].oldest_version for g in ("g5", "g6", "g7", "g8")] == [2, 2, 3, 3]


def test_files_of_a_group_go_when_it_is_in_the_ledger_and_not_before(tmp_path):
    path, keeping = tmp_path / "l", Keeping(tmp_path, every_turns=1)

    class Writing(KilledRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            keeping.of(f"{group_id}/0").folder.mkdir(parents=True, exist_ok=True)
            return await super().run_group(split, index, group_id, size, temperature, keeping)

    def there():
        return sorted(p.name for p in (tmp_path / "open").iterdir())

    policy = StandInPolicy()
    rollouts = Writing(policy, last={5}, broken={1})
    killed(path, policy, rollouts, keeping=keeping)
    ended = {e["group"] for e in events(path, "group", "drop")}
    assert "g1" in ended and "g5" in there() and set(there()) <= rollouts.asked.keys() - ended
    policy = StandInPolicy(version=policy.saved[-1] if policy.saved else 0)
    run(path, policy, Writing(policy), keeping=keeping)
    assert there() == []


def test_a_group_that_ends_the_run_each_time_is_left_out(tmp_path):
    path = tmp_path / "l"
    for _ in range(2):
        policy = StandInPolicy()
        killed(path, policy, KilledRollouts(policy, last={2}), num_steps=2)
    policy = StandInPolicy()
    steps, warnings = run(path, policy, KilledRollouts(policy, last={2}), num_steps=2)
    assert len(steps) == 2 and sorted(trained_tasks(path)) == ["g0", "g1", "g3", "g4"]
    assert warnings == ["group g2 was dropped: the run has failed 2 times while it ran"]


def test_a_run_that_is_interrupted_again_and_again_leaves_no_group_out(tmp_path):
    class Stuck(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            await asyncio.sleep(60)
            raise AssertionError

    async def interrupted():
        policy, state = StandInPolicy(), read_ledger(path, {})
        ledger = Ledger(path)
        algorithm = AlgorithmConfig(name="t", num_steps=2, learning_rate=1.0, groups_per_step=2, group_size=2)
        running = Controller(algorithm, Stuck(policy), policy, ledger, state, 0, 0, print, print).run()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 0.05)
        ledger.close()

    path = tmp_path / "l"
    for _ in range(5):
        asyncio.run(interrupted())
    assert [e["group"] for e in events(path, "start")] == ["g0", "g1", "g2", "g3"]
    policy = StandInPolicy()
    run(path, policy, StandInRollouts(policy), num_steps=2)
    assert sorted(trained_tasks(path)) == ["g0", "g1", "g2", "g3"]


@pytest.mark.parametrize("error", [ClusterError("Ray has ended"), OSError("no space left")])
def test_the_end_of_ray_or_of_the_disks_room_is_no_groups_fault(tmp_path, error):
    class Gone(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            raise error

    with pytest.raises(type(error)):
        run(tmp_path / "l", StandInPolicy(), Gone(StandInPolicy()))
    assert not events(tmp_path / "l", "crash") and events(tmp_path / "l", "start")
