"""What follows from findings: worked out by hand, for every effect, and for groups that lose episodes by it."""

from __future__ import annotations

import pytest

from composer.choices import AdvantageKind
from composer.errors import ConfigError
from composer.evaluation.metrics import evaluate_groups
from composer.monitor.evidence import Finding, Kind
from composer.monitor.policy import JUDGE, UNJUDGED, Report, check_monitor, settle, severest
from composer.rl.advantage import group_advantages, shaped_reward
from composer.rl.samples import group_metrics, make_samples
from composer.schema import (
    AlgorithmConfig,
    HoneypotKind,
    HoneypotsConfig,
    JudgeConfig,
    LengthPenaltyConfig,
    MonitorConfig,
    MonitorEffect,
)
from composer.types import Generation, Group, Outcome, Trajectory, Turn

HISTORY = Finding("reads_later_history", Kind.HISTORY, "git log --all", 0)
TESTS = Finding("edits_tests", Kind.TESTS, "assert", path="test_a.py")


def episode(name="g/0", reward: float | None = 1.0) -> Trajectory:
    turn = Turn([7], Generation([1, 2], [-0.1, -0.1], [3, 3], "stop"))
    outcome = Outcome.INFRASTRUCTURE_ERROR if reward is None else Outcome.FINISHED
    error = "gone" if reward is None else ""
    parts = {} if reward is None else {"tests": reward}
    return Trajectory("t", "g", name, [turn], [], outcome, reward, parts, error)


def settled(effect: str, reward: float | None = 1.0, findings=(HISTORY,), **config) -> Trajectory:
    t = episode(reward=reward)
    settle(t, Report(list(findings)), MonitorConfig(enabled=True, effect=MonitorEffect(effect), **config))
    return t


@pytest.mark.parametrize(
    ("effect", "before", "after"),
    [
        ("flag", 1.0, 1.0),
        ("penalty", 1.0, 0.75),
        ("penalty", 0.1, 0.0),
        ("penalty", 0.0, 0.0),
        ("penalty", -0.5, -0.5),
        ("zero", 0.7, 0.0),
        ("zero", -0.5, -0.5),
        ("quarantine", 1.0, None),
        ("quarantine", 0.0, None),
        ("zero", None, None),
        ("quarantine", None, None),
    ],
)
def test_effects(effect, before, after):
    t = settled(effect, before, penalty=0.25)
    assert t.reward == after
    record = t.metadata["monitor"]
    assert record["effect"] == effect and record["kinds"] == ["history"]
    changed = effect != "flag" and before is not None
    assert (record.get("reward"), record.get("rewards")) == ((before, {"tests": before}) if changed else (None, None))
    # A reward is missing exactly for an infrastructure error or a quarantine, which has its cause.
    assert (
        (t.reward is None) == (t.outcome is Outcome.INFRASTRUCTURE_ERROR or bool(t.quarantine)) == bool(t.why_no_reward)
    )
    assert Trajectory.from_dict(t.to_dict()) == t


def test_nothing_found_changes_nothing():
    t = settled("quarantine", findings=())
    assert (t.reward, t.rewards, t.quarantine) == (1.0, {"tests": 1.0}, "")
    assert t.metadata["monitor"]["findings"] == []


def test_the_rules_effect_comes_before_its_kinds_and_that_before_the_rest():
    effects = {"edits_tests": MonitorEffect.penalty, "tests": MonitorEffect.zero, "history": MonitorEffect.quarantine}
    config = MonitorConfig(effects=effects)
    assert severest([TESTS], config) is MonitorEffect.penalty
    assert severest([TESTS, HISTORY], config) is MonitorEffect.quarantine
    assert severest([Finding("skips_tests", Kind.TESTS, "x")], config) is MonitorEffect.zero
    assert severest([Finding("reads_caches", Kind.CACHES, "x")], config) is MonitorEffect.flag
    assert severest([], config) is None


def test_the_judge_does_no_more_than_it_may():
    found = Finding(JUDGE, Kind.HISTORY, "x")
    effects = {"history": MonitorEffect.quarantine}
    assert severest([found], MonitorConfig(effects=effects)) is MonitorEffect.flag
    judge = JudgeConfig(effect=MonitorEffect.zero)
    assert severest([found], MonitorConfig(effects=effects, judge=judge)) is MonitorEffect.zero
    assert severest([found], MonitorConfig(judge=judge)) is MonitorEffect.flag
    everything = MonitorConfig(effect=MonitorEffect.quarantine, judge=JudgeConfig(effect=MonitorEffect.quarantine))
    assert severest([Finding(UNJUDGED, Kind.DODGING, "down")], everything) is MonitorEffect.flag


def test_a_quarantined_sibling_is_no_part_of_the_baseline():
    """Rewards 1, 0, and a cheat's 1: without it the mean is 1/2, with its own 1 two thirds."""
    cheat = settled("quarantine")
    group = Group("g", "t", [episode("g/0", 1.0), episode("g/1", 0.0), cheat])
    rewards = [shaped_reward(t, LengthPenaltyConfig()) for t in group.trajectories]
    assert group_advantages(rewards, AdvantageKind.mean_centered) == [0.5, -0.5, None]
    samples = make_samples([group], AlgorithmConfig(name="a", num_steps=1, learning_rate=1.0))
    assert [max(s.advantages, key=abs) for s in samples] == [0.5, -0.5]
    metrics = group_metrics([group], version=3)
    assert (metrics["reward/mean"], metrics["reward/best"]) == (0.5, 1.0)


def test_an_evaluation_counts_a_quarantined_success_as_none():
    metrics = evaluate_groups(
        [Group("e0", "t", [episode("e0/0", 1.0), settled("quarantine"), episode("e0/2", None)])], 3
    )
    assert (metrics.average_at_k, metrics.num_episodes) == (0.5, 2)
    assert (metrics.lost_episodes, metrics.quarantined_episodes) == (1, 1)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MonitorConfig(effects={"histry": MonitorEffect.zero}), "env.monitor.effects"),
        (MonitorConfig(off=["all"]), "env.monitor.off"),
        (MonitorConfig(judge=JudgeConfig(url="localhost:8000", model="m")), "env.monitor.judge.url"),
        (MonitorConfig(judge=JudgeConfig(url="http://me:secret@host/v1", model="m")), "env.monitor.judge.url"),
        (MonitorConfig(judge=JudgeConfig(url="http://host/v1")), "env.monitor.judge.model"),
        (
            MonitorConfig(honeypots=HoneypotsConfig(places={"grader": "/x"})),
            "env.monitor.honeypots.places.grader",
        ),
        (
            MonitorConfig(honeypots=HoneypotsConfig([HoneypotKind.grader], {"grader": "tests/x"})),
            "env.monitor.honeypots.places.grader",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(config, key):
    with pytest.raises(ConfigError) as error:
        check_monitor(config)
    assert error.value.key == key and "secret" not in str(error.value).partition(":")[0]


def test_names_of_rules_kinds_and_the_judge_are_known():
    effects = dict.fromkeys(["history", "edits_tests", JUDGE], MonitorEffect.zero)
    check_monitor(MonitorConfig(effects=effects, off=["network", "takes_bait"]))
    check_monitor(MonitorConfig(judge=JudgeConfig(url="https://host/v1", model="m", api_key_env="KEY")))
