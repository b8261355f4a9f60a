"""Advantages and the length penalty, against values worked out by hand."""

import math

import pytest

from composer.rl.advantage import group_advantages, length_cost, shaped_reward
from composer.schema import AdvantageKind, LengthPenaltyConfig
from composer.types import Generation, Outcome, ToolCall, Trajectory, Turn


def trajectory(reward, generated=(4, 6), calls=1):
    turns = [
        Turn([1, 2, 3], Generation([5] * n, [-0.1] * n, [0] * n, "stop"), [ToolCall("f", {})] * calls)
        for n in generated
    ]
    return Trajectory("t", "g", "e", turns, [], Outcome.FINISHED, reward)


def test_mean_centred_advantages_are_reward_minus_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], AdvantageKind.mean_centered) == [0.5, -0.5, -0.5, 0.5]


def test_an_all_correct_group_has_no_advantage_however_it_is_scaled():
    for kind in AdvantageKind:
        assert group_advantages([1.0, 1.0, 1.0], kind) == [0.0, 0.0, 0.0]


def test_standardized_divides_by_the_sample_deviation():
    # rewards 0, 1: mean 1/2, sample variance 1/2
    low, high = group_advantages([0.0, 1.0], AdvantageKind.standardized)
    assert high == pytest.approx(0.5 / math.sqrt(0.5), rel=1e-5)
    assert low == -high


def test_an_episode_without_reward_is_left_out_of_the_mean():
    assert group_advantages([1.0, None, 0.0], AdvantageKind.mean_centered) == [0.5, None, -0.5]


def test_a_single_reward_has_no_baseline():
    assert group_advantages([1.0, None], AdvantageKind.mean_centered) == [0.0, None]


def test_length_cost_has_the_limits_of_the_formula():
    assert length_cost(7.0, k=0.3, q=0.0) == pytest.approx(7.0)
    assert length_cost(7.0, k=0.3, q=1.0) == pytest.approx(math.log(1 + 2.1) / 0.3)
    assert length_cost(7.0, k=0.3, q=1.0 - 1e-7) == pytest.approx(math.log(1 + 2.1) / 0.3, rel=1e-5)
    assert length_cost(3.0, k=1.0, q=0.5) == 2.0
    assert length_cost(0.0, k=1.0, q=0.5) == 0.0


def test_shaped_reward_subtracts_penalty_and_kl():
    # x = 0.1 * 10 generated + 0.5 * 2 calls + 0.5 * 2 turns = 3; C(3) = 2 with k = 1, q = 0.5
    penalty = LengthPenaltyConfig(coefficient=0.25, k=1.0, q=0.5, generated_tokens=0.1, tool_calls=0.5, turns=0.5)
    assert shaped_reward(trajectory(1.0), penalty, kl=0.1) == pytest.approx(1.0 - 0.5 - 0.1)


def test_tool_output_tokens_count_without_the_first_prompt():
    penalty = LengthPenaltyConfig(coefficient=1.0, q=0.0, generated_tokens=0.0, tool_output_tokens=0.1)
    assert shaped_reward(trajectory(1.0), penalty) == pytest.approx(1.0 - 0.3)


def test_no_reward_stays_no_reward():
    assert shaped_reward(trajectory(None), LengthPenaltyConfig(coefficient=1.0)) is None
