"""The records: what they derive from their turns, and that they survive JSON."""

import json
import math

import pytest

from composer.types import FRESH, Generation, Group, Message, Mismatch, Outcome, ToolCall, Trajectory, Turn


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


def generated(*ids: int, version: int = 0) -> Generation:
    return Generation(list(ids), [-i / 10 for i in ids], [version] * len(ids), "stop")


def forest() -> Trajectory:
    """Turn 1 continues turn 0, turn 2 does so too, turn 3 starts anew, turn 4 continues turn 2.

    0 - 1
      \\ 2 - 4
    3
    """
    t = trajectory()
    t.turns = [
        Turn([1, 2], generated(3, version=5)),
        Turn([4], generated(5, version=6)),
        Turn([6], generated(7, 8, version=7), parent=0),
        Turn([9], generated(10, version=2), parent=FRESH),
        Turn([11], generated(12, version=8), parent=2),
    ]
    return t


def test_branches_are_paths_and_every_generated_token_is_learned_from_once():
    t = forest()
    assert t.parents == [None, 0, 0, None, 2]
    first, fresh, second = t.paths
    assert first.token_ids == [1, 2, 3, 4, 5]
    assert first.loss_mask == [False, False, True, False, True]
    assert first.log_probs == [0.0, 0.0, -0.3, 0.0, -0.5] and first.policy_version == 5
    assert (fresh.token_ids, fresh.loss_mask, fresh.policy_version) == ([9, 10], [False, True], 2)
    # The third path has turn 0 as context only: the first one trains it.
    assert second.token_ids == [1, 2, 3, 6, 7, 8, 11, 12]
    assert second.loss_mask == [False, False, False, False, True, True, False, True]
    assert second.log_probs == [0.0, 0.0, 0.0, 0.0, -0.7, -0.8, 0.0, -1.2] and second.policy_version == 7
    assert t.num_generated_tokens == sum(t.loss_mask) == 6
    assert t.token_ids == [*first.token_ids, *fresh.token_ids, *second.token_ids]
    assert t.oldest_policy_version == 2


def test_an_episode_without_turns_has_no_path():
    t = trajectory()
    t.turns = []
    assert (t.paths, t.parents, t.token_ids) == ([], [], [])


@pytest.mark.parametrize("parent", [1, 2])
def test_a_turn_goes_on_from_an_earlier_one(parent: int):
    t = trajectory()
    t.turns[1].parent = parent
    with pytest.raises(ValueError, match="goes on from one that was not before it"):
        _ = t.paths


def test_branches_survive_json_and_old_records_have_none():
    t = forest()
    d = json.loads(json.dumps(t.to_dict()))
    assert Trajectory.from_dict(d) == t
    for turn in d["turns"]:
        del turn["parent"]
    assert Trajectory.from_dict(d).parents == [None, 0, 1, 2, 3]
