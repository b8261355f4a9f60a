"""The evaluation stage continues where it was interrupted and fails with a remedy.

`StandInRollouts` stands in for the env workers.
"""

import asyncio

import pytest

from composer.errors import GeneratorError, ResumeError
from composer.evaluation.stage import evaluate, read_groups
from composer.rollout.checkpoint import Keeping
from composer.schema import EvaluationConfig
from composer.types import Generation, Group, Outcome, Split, Trajectory, Turn


class StandInRollouts:
    def __init__(self, fail=(), seconds=0.0):
        self.fail, self.seconds, self.asked = fail, seconds, []

    async def run_group(self, split, index, group_id, size, temperature, keeping):
        assert split is Split.EVALUATION
        self.asked.append(index)
        await asyncio.sleep(self.seconds)
        if index in self.fail:
            raise GeneratorError("stand-in outage")
        turn = Turn([1], Generation([2], [-0.1], [0], "stop"))
        episodes = [
            Trajectory(f"t{index}", group_id, str(i), [turn], [], Outcome.FINISHED, float(index % 2))
            for i in range(size)
        ]
        return Group(group_id, f"t{index}", episodes)


def run(folder, rollouts, keeping=Keeping(), **kwargs):  # noqa: B008 - frozen
    config = EvaluationConfig(num_tasks=6, samples_per_task=2, **kwargs)
    seen, warnings = [], []
    result = asyncio.run(evaluate(config, rollouts, folder, lambda n, g: seen.append(n), warnings.append, keeping))
    return *result, seen, warnings


def test_an_interrupted_evaluation_runs_only_what_is_missing(tmp_path):
    with pytest.raises(GeneratorError, match=r"4 of the evaluation's 12 episodes were lost.*stand-in outage.*resume"):
        run(tmp_path, StandInRollouts(fail={1, 4}))
    torn = (tmp_path / "groups.jsonl").read_text() + '{"id": "e1'
    (tmp_path / "groups.jsonl").write_text(torn)
    rollouts = StandInRollouts()
    metrics, groups, seen, _ = run(tmp_path, rollouts)
    assert sorted(rollouts.asked) == [1, 4]
    assert [g.task_id for g in groups] == [f"t{i}" for i in range(6)]
    assert seen[-1] == 6 and metrics.average_at_k == 0.5


def test_a_task_that_lost_an_episode_is_run_once_more(tmp_path):
    class Flaky(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            first = index not in self.asked
            group = await super().run_group(split, index, group_id, size, temperature, keeping)
            if index == 2 and first:
                group.trajectories[0].outcome = Outcome.INFRASTRUCTURE_ERROR
                group.trajectories[0].reward = None
                group.trajectories[0].error = "stand-in outage"
            return group

    rollouts = Flaky()
    metrics, _, _, warnings = run(tmp_path, rollouts)
    assert rollouts.asked.count(2) == 2 and len(rollouts.asked) == 7
    assert metrics.lost_episodes == 0 and metrics.num_tasks == 6
    assert "run once more: stand-in outage" in warnings[0]


def test_files_of_a_task_go_when_it_is_on_record_and_not_before(tmp_path):
    keeping = Keeping(tmp_path / "episodes", every_turns=1)

    class Writing(StandInRollouts):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            keeping.of(f"{group_id}/0").folder.mkdir(parents=True, exist_ok=True)
            return await super().run_group(split, index, group_id, size, temperature, keeping)

    def there():
        return sorted(p.name for p in (tmp_path / "episodes/open").iterdir())

    with pytest.raises(GeneratorError):
        run(tmp_path, Writing(fail={1, 4}), keeping)
    assert there() == ["e1", "e4"] and sorted(g.id for g in read_groups(tmp_path)) == ["e0", "e2", "e3", "e5"]
    # Killed between the record and the removal; and left by an evaluation of more tasks.
    for name in ("e0", "e6"):
        keeping.of(f"{name}/0").folder.mkdir(parents=True)
    seen = []

    class Looking(Writing):
        async def run_group(self, split, index, group_id, size, temperature, keeping):
            seen.append(there())
            return await super().run_group(split, index, group_id, size, temperature, keeping)

    run(tmp_path, Looking(), keeping)
    assert seen[0] == ["e1", "e4"] and there() == []


def test_a_deadline_names_the_key(tmp_path):
    with pytest.raises(GeneratorError, match=r"evaluation\.timeout_s=0\.05"):
        run(tmp_path, StandInRollouts(seconds=5), timeout_s=0.05)


def test_nothing_scored_is_an_error(tmp_path):
    with pytest.raises(GeneratorError, match="12 of the evaluation's 12 episodes were lost"):
        run(tmp_path, StandInRollouts(fail=set(range(6))))


def test_a_damaged_file_of_finished_tasks_is_named(tmp_path):
    (tmp_path / "groups.jsonl").write_bytes(b'{"id": "e0"}\n\xff\n')
    with pytest.raises(ResumeError, match=r"groups\.jsonl is damaged .* delete it"):
        run(tmp_path, StandInRollouts())
