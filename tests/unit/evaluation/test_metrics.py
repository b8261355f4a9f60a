"""Evaluation metrics, against values worked out by hand."""

import math

import pytest

from composer.evaluation.metrics import evaluate_groups
from composer.types import Generation, Group, Outcome, Trajectory, Turn


def group(name, rewards, tokens=4):
    turn = Turn([1], Generation([2] * tokens, [-0.1] * tokens, [0] * tokens, "stop"))
    return Group(
        name,
        name,
        [
            Trajectory(
                name,
                name,
                str(i),
                [turn, turn],
                [],
                Outcome.INFRASTRUCTURE_ERROR if r is None else Outcome.FINISHED,
                r,
                seconds=2.0,
            )
            for i, r in enumerate(rewards)
        ],
    )


def test_average_and_best_are_means_over_tasks():
    metrics = evaluate_groups([group("a", [1.0, 0.0, 0.0, 0.0]), group("b", [0.0] * 4), group("c", [1.0] * 4)], k=4)
    assert metrics.average_at_k == pytest.approx((0.25 + 0 + 1) / 3)
    assert metrics.best_at_k == pytest.approx(2 / 3)
    # sample variance of 0.25, 0, 1 is 0.270833; over 3 tasks
    assert metrics.standard_error == pytest.approx((0.2708333333 / 3) ** 0.5)
    assert (metrics.generated_tokens, metrics.turns, metrics.seconds) == (8.0, 2.0, 2.0)
    assert metrics.to_dict()["average_at_4"] == metrics.average_at_k


def test_lost_episodes_are_counted_and_are_not_zeros():
    metrics = evaluate_groups([group("a", [1.0, None]), group("b", [None, None])], k=2)
    assert metrics.average_at_k == 1.0
    assert math.isnan(metrics.standard_error), "one task says nothing of how tasks differ"
    assert (metrics.lost_episodes, metrics.num_tasks) == (3, 1)


def test_no_reward_at_all_is_an_error():
    with pytest.raises(ValueError, match="no episode"):
        evaluate_groups([group("a", [None])], k=1)
