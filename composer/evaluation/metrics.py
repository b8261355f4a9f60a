"""Metrics of an evaluation. Pure Python: groups of rewards in, numbers out.

    average@k = mean over tasks of (mean over its k episodes of the reward)
    best@k    = mean over tasks of (max over its k episodes of the reward)

Episodes lost to infrastructure are left out of both and counted; a task with none left is left out too. One that the
cheat monitor has in quarantine counts as 0: a success by cheating is none, and to leave it out would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from composer.types import Group, Outcome, Trajectory


@dataclass(frozen=True)
class EvaluationMetrics:
    """What one evaluation says. Means are over episodes unless said otherwise."""

    k: int
    num_tasks: int
    num_episodes: int
    average_at_k: float
    best_at_k: float
    standard_error: float
    """Of average@k, with tasks as the independent samples: episodes of one task are alike. NaN of a single task."""
    generated_tokens: float
    turns: float
    seconds: float
    valid_share: float
    """Share of episodes that ended by the env's own ending rather than a limit or a malformed call."""
    lost_episodes: int
    quarantined_episodes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the k in the names: `average_at_8`, `best_at_8`."""
        d = asdict(self)
        d[f"average_at_{self.k}"] = d.pop("average_at_k")
        d[f"best_at_{self.k}"] = d.pop("best_at_k")
        return d


def evaluate_groups(groups: Sequence[Group], k: int) -> EvaluationMetrics:
    """Summarise the episodes of an evaluation; `k` is the number of episodes asked for per task.

    Raises:
        ValueError: no episode has a reward.
    """
    episodes = [t for g in groups for t in g.trajectories]
    scored = [t for t in episodes if value(t) is not None]
    if not scored:
        raise ValueError("no episode of the evaluation has a reward; see the infrastructure errors in its file")
    per_task = [rewards for g in groups if (rewards := [r for t in g.trajectories if (r := value(t)) is not None])]
    averages = [sum(r) / len(r) for r in per_task]
    average = sum(averages) / len(averages)
    error = stdev(averages) / math.sqrt(len(averages)) if len(averages) > 1 else math.nan

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return EvaluationMetrics(
        k=k,
        num_tasks=len(per_task),
        num_episodes=len(scored),
        average_at_k=average,
        best_at_k=mean([max(r) for r in per_task]),
        standard_error=error,
        generated_tokens=mean([t.num_generated_tokens for t in scored]),
        turns=mean([len(t.turns) for t in scored]),
        seconds=mean([t.seconds for t in scored]),
        valid_share=mean([float(t.outcome is Outcome.FINISHED) for t in scored]),
        lost_episodes=len(episodes) - len(scored),
        quarantined_episodes=sum(bool(t.quarantine) for t in episodes),
    )


def value(t: Trajectory) -> float | None:
    """What an episode counts in an evaluation; None for one that was lost."""
    return 0.0 if t.quarantine else t.reward
