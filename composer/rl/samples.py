"""Groups of finished episodes -> trainable samples with advantages, and what a step's episodes look like in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from composer.rl.advantage import group_advantages, shaped_reward
from composer.schema import AlgorithmConfig
from composer.types import Group, Outcome, Sample


def make_samples(
    groups: Sequence[Group], algorithm: AlgorithmConfig, kl: Mapping[str, float] | None = None
) -> list[Sample]:
    """One sample for each path of an episode that has a reward: of most episodes, one.

    All generated tokens of an episode have its advantage, on whichever path they are.

    Args:
        groups: sibling episodes; those lost to infrastructure are left out.
        algorithm: length penalty and advantage kind.
        kl: episode id -> k1 estimate (sum over generated tokens of log pi - log pi_ref), if a reference is kept.
    """
    samples = []
    for group in groups:
        rewards = [
            shaped_reward(t, algorithm.length_penalty, algorithm.kl_coefficient * (kl or {}).get(t.episode_id, 0.0))
            for t in group.trajectories
        ]
        advantages = group_advantages(rewards, algorithm.advantage)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if advantage is None or trajectory.num_generated_tokens == 0:
                continue
            for path in trajectory.paths:
                samples.append(
                    Sample(
                        token_ids=path.token_ids,
                        loss_mask=path.loss_mask,
                        log_probs=path.log_probs,
                        advantages=[advantage if m else 0.0 for m in path.loss_mask],
                        group_id=group.id,
                        policy_version=path.policy_version,
                    )
                )
    return samples


def group_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What the episodes of one optimizer step say, by metric name.

    Args:
        groups: the step's groups, each with at least one reward.
        version: the trainer's version when it takes them.
    """
    episodes = [t for g in groups for t in g.trajectories if t.reward is not None]
    rewards = [[t.reward for t in g.trajectories if t.reward is not None] for g in groups]
    staleness = [version - t.oldest_policy_version for t in episodes]
    outcomes = Counter(t.outcome for g in groups for t in g.trajectories)
    total = sum(outcomes.values())

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "reward/mean": mean([t.reward or 0.0 for t in episodes]),
        "reward/best": mean([max(r) for r in rewards]),
        "reward/zero_variance_share": mean([float(max(r) == min(r)) for r in rewards]),
        "staleness/mean": mean(staleness),
        "staleness/max": float(max(staleness)),
        "episode/generated_tokens": mean([t.num_generated_tokens for t in episodes]),
        "episode/turns": mean([len(t.turns) for t in episodes]),
        "episode/paths": mean([len(t.paths) for t in episodes]),
        "episode/seconds": mean([t.seconds for t in episodes]),
        **{f"outcome/{o.value}": outcomes[o] / total for o in Outcome},
    }
