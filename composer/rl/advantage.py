"""Rewards of a group -> advantages. Pure Python: numbers in, numbers out.

    A_i = R_i - mean_j R_j                  mean_centered (Dr. GRPO, arXiv 2503.20783; Composer 2 report, RL section)
    A_i = (R_i - mean_j R_j) / std_j R_j    standardized (GRPO, arXiv 2402.03300)
    R_i = r_i - c * C(x_i) - beta * k1_i    length penalty and KL enter the reward, before the mean is taken

The mean-centred form is the default: dividing by the deviation blows up trivial differences in an all-correct group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from composer.schema import AdvantageKind, LengthPenaltyConfig
from composer.types import Trajectory


def length_cost(x: float, k: float, q: float) -> float:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), the concave cost of effort `x` (Composer 2 report).

    Its limits: q = 0 gives x, and q -> 1 gives ln(1 + k x) / k.

    Args:
        x: effort, >= 0.
        k: how early the curve bends, > 0.
        q: how much it bends, >= 0.

    Example:
        >>> length_cost(3.0, k=1.0, q=0.5)  # ((1 + 3)^0.5 - 1) / 0.5
        2.0
    """
    if math.isclose(q, 1.0):
        return math.log1p(k * x) / k
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


def effort(trajectory: Trajectory, weights: LengthPenaltyConfig) -> float:
    """The weighted sum x that the length penalty is a function of."""
    starts = zip(trajectory.turns, trajectory.parents, strict=True)
    tool_tokens = sum(len(turn.prompt_ids) for turn, parent in starts if parent is not None)
    return (
        weights.generated_tokens * trajectory.num_generated_tokens
        + weights.tool_output_tokens * tool_tokens
        + weights.tool_calls * sum(len(turn.tool_calls) for turn in trajectory.turns)
        + weights.turns * len(trajectory.turns)
    )


def shaped_reward(trajectory: Trajectory, penalty: LengthPenaltyConfig, kl: float = 0.0) -> float | None:
    """The reward that advantages are taken of; None for an episode without one (an infrastructure error).

    Args:
        trajectory: the episode.
        penalty: the length penalty; its coefficient 0 switches it off.
        kl: beta * sum_t (log pi(t) - log pi_ref(t)), the k1 estimate over the episode's generated tokens.
    """
    if trajectory.reward is None:
        return None
    cost = (
        penalty.coefficient * length_cost(effort(trajectory, penalty), penalty.k, penalty.q)
        if penalty.coefficient
        else 0.0
    )
    return trajectory.reward - cost - kl


def group_advantages(rewards: Sequence[float | None], kind: AdvantageKind) -> list[float | None]:
    """Advantages of sibling episodes, [group_size]; None where the reward is None, which also leaves the mean alone.

    A group with fewer than two rewards has no baseline: its advantages are 0.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, None], AdvantageKind.mean_centered)[0]
        0.6666666666666667
    """
    known = [r for r in rewards if r is not None]
    if len(known) < 2:
        return [None if r is None else 0.0 for r in rewards]
    mean = sum(known) / len(known)
    scale = 1.0
    if kind is AdvantageKind.standardized:
        scale = math.sqrt(sum((r - mean) ** 2 for r in known) / (len(known) - 1)) + 1e-6
    return [None if r is None else (r - mean) / scale for r in rewards]
