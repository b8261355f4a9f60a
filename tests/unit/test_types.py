"""The records: what they derive from their turns, and that they survive JSON."""

import json
import math

import pytest

from composer.types import Generation, Group, Message, Mismatch, Outcome, ToolCall, Trajectory, Turn


def trajectory() -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id="g",
        episode_id="g/0",
        turns=[
            Turn([1, 2], Generation([3, 4], [-0.5, -0.25], [7, 8], "stop"), [ToolCall("f", {"a": 1})], "ok", 1.5, 1.0),
            Turn([5], Generation([6], [-1.0], [8], "length")),
        ],
        messages=[Message("user", "do"), Message("assistant", "f", (ToolCall("f", {"a": 1}),))],
        outcome=Outcome.MAX_TURNS,
        reward=0.0,
    )


def test_a_trajectory_is_its_turns_in_a_row():
    t = trajectory()
    assert t.token_ids == [1, 2, 3, 4, 5, 6]
    assert t.loss_mask == [False, False, True, True, False, True]
    assert t.log_probs == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0]
    assert t.num_generated_tokens == 3
    assert t.oldest_policy_version == 7


def test_groups_survive_json():
    group = Group("g", "t", [trajectory()])
    assert Group.from_dict(json.loads(json.dumps(group.to_dict()))) == group


def test_mismatch_by_hand():
    m = Mismatch.of([-1.0, -2.0], [-1.5, -2.25])
    # d = -1/2, -1/4: mean of e^d - 1 - d
    assert m.k3 == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(-0.25) - 0.75) / 2)
    assert (m.p90, m.p99, m.max) == (0.5, 0.5, 0.5)
    many = Mismatch.of([0.0] * 200, [-i / 1000 for i in range(200)])
    assert (many.p90, many.p99) == (0.179, 0.197), "the 180th and the 198th of 200"
    assert many.max == 0.199


@pytest.mark.parametrize("trainer", [[-1.0], [-1.0, math.nan], [-1.0, -math.inf], []])
def test_a_mismatch_that_cannot_be_told_is_within_no_tolerance(trainer):
    m = Mismatch.of([-1.0, -2.0], trainer)
    assert not m.p90 <= 1e9 and not m.max <= 1e9
