"""Samples of episodes with branches: one a path, each generated token in one, all with the episode's advantage."""

from composer.rl.advantage import effort
from composer.rl.controller import _k1
from composer.rl.packing import pack
from composer.rl.samples import group_metrics, make_samples
from composer.schema import AlgorithmConfig, LengthPenaltyConfig
from composer.types import FRESH, Generation, Group, Outcome, Trajectory, Turn

ALGORITHM = AlgorithmConfig(name="test")


def turn(prompt: list[int], ids: list[int], **more: int) -> Turn:
    return Turn(prompt, Generation(ids, [-float(i) for i in ids], [1] * len(ids), "stop"), **more)


def episode(name: str, reward: float, turns: list[Turn]) -> Trajectory:
    return Trajectory("t", "g", name, turns, [], Outcome.FINISHED, reward)


def branched() -> Trajectory:
    return episode("g/0", 1.0, [turn([1, 2], [3]), turn([4], [5]), turn([6], [7], parent=0)])


def group() -> Group:
    return Group("g", "t", [branched(), episode("g/1", 0.0, [turn([1, 2], [8, 9])])])


def test_one_sample_a_path_and_the_shared_prefix_is_trained_once():
    first, second, other = make_samples([group()], ALGORITHM)
    # Rewards 1 and 0 around their mean: each episode counts once, however many paths it has.
    assert first.token_ids == [1, 2, 3, 4, 5] and first.advantages == [0.0, 0.0, 0.5, 0.0, 0.5]
    assert second.token_ids == [1, 2, 3, 6, 7] and second.advantages == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert second.loss_mask == [False, False, False, False, True] and second.log_probs == [0.0, 0.0, 0.0, 0.0, -7.0]
    assert other.token_ids == [1, 2, 8, 9] and other.advantages == [0.0, 0.0, -0.5, -0.5]


def test_the_packed_targets_are_the_generated_tokens_once():
    [rows] = pack(make_samples([group()], ALGORITHM), 1, 64, pad_id=0)
    targets = sorted(int(label) for r in rows for label in r.labels[r.loss_mask])
    assert targets == [3, 5, 7, 8, 9]


def test_numbers_of_an_episode_with_branches():
    metrics = group_metrics([group()], version=3)
    assert metrics["episode/paths"] == 1.5 and metrics["episode/turns"] == 2.0
    assert metrics["episode/generated_tokens"] == 2.5 and metrics["staleness/max"] == 2.0


def test_the_first_prompt_of_a_fresh_context_is_no_tool_output():
    t = episode("g/0", 1.0, [turn([1, 2], [3]), turn([4], [5]), turn([6, 7, 8], [9], parent=FRESH)])
    assert effort(t, LengthPenaltyConfig(generated_tokens=0.0, tool_output_tokens=1.0)) == 1.0


def test_the_estimate_of_kl_adds_up_over_paths():
    first, second = branched().paths
    # log pi - log pi_ref of the generated tokens: 3 and 5 on the first path, 7 on the second.
    assert _k1(first, [-9.0, -4.0, -9.0, -5.5]) == (-3.0 + 4.0) + (-5.0 + 5.5)
    assert _k1(second, [-9.0, -4.0, -9.0, -7.25]) == 0.25
