"""What the monitor found, over the steps of a stage: metrics, a table, and a file with rates and examples."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer.choices import MonitorEffect
from composer.monitor.evidence import Kind, cut
from composer.monitor.policy import record_of
from composer.types import Group, Trajectory

FILE = "monitor.json"
EXAMPLES_PER_RULE = 5
"""The newest are kept."""
_MAX_MESSAGE = 200


def monitor_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What was found in the episodes of one step, by metric name; nothing if nobody has looked.

    Shares are of the episodes that were looked at; those of judged ones, of the episodes that the judge was asked for.
    """
    records = [(t, r) for g in groups for t in g.trajectories if (r := record_of(t.metadata)) is not None]
    failed = sum("failed" in t.metadata.get("monitor", {}) for g in groups for t in g.trajectories)
    if not records and not failed:
        return {}
    num = max(1, len(records))
    kinds = Counter(kind for _, record in records for kind in record["kinds"])
    effects = Counter(record["effect"] for _, record in records)
    asked = [record["judged"] for _, record in records if record["judged"] is not None]
    rewarded = [record for t, record in records if record.get("reward", t.reward or 0.0) > 0]
    return {
        "monitor/episodes": float(len(records)),
        "monitor/failed": float(failed),
        "monitor/found_share": sum(bool(record["kinds"]) for _, record in records) / num,
        "monitor/found_share_of_rewarded": sum(bool(r["kinds"]) for r in rewarded) / max(1, len(rewarded)),
        **{f"monitor/kind/{kind.value}": kinds[kind.value] / num for kind in Kind},
        **{f"monitor/effect/{effect.value}": effects[effect.value] / num for effect in MonitorEffect},
        "monitor/judge/asked": float(len(asked)),
        "monitor/judge/unjudged_share": sum(not judged for judged in asked) / max(1, len(asked)),
    }


def rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """One row a finding, for a table."""
    return [
        {
            "task": t.task_id,
            "episode": t.episode_id,
            "rule": finding["rule"],
            "kind": str(finding["kind"]),
            "effect": record["effect"],
            "reward before": record.get("reward", t.reward),
            "reward": t.reward,
            "where": finding["path"] or (f"step {finding['step']}" if finding["step"] is not None else ""),
            "excerpt": finding["excerpt"],
            "why": finding["reason"],
        }
        for g in groups
        for t in g.trajectories
        if (record := record_of(t.metadata)) is not None
        for finding in record["findings"]
    ]


class MonitorLog:
    """Rates of every step and the newest examples of every rule, kept in a file that a resumed stage goes on with."""

    def __init__(self, path: Path) -> None:
        """Read what an interrupted stage left; a damaged file is begun anew."""
        self.path = path
        self._steps: dict[int, dict[str, float]] = {}
        self._examples: dict[str, deque[dict[str, Any]]] = {}
        try:
            found = json.loads(path.read_bytes())
            self._steps = {int(step): dict(rates) for step, rates in found["steps"].items()}
            self._examples = {rule: deque(e, EXAMPLES_PER_RULE) for rule, e in found["examples"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass

    @property
    def table(self) -> list[dict[str, Any]]:
        """The examples, rule by rule."""
        return [{"rule": rule, **example} for rule, kept in sorted(self._examples.items()) for example in kept]

    def add(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Take up a step's episodes; returns their metrics."""
        metrics = monitor_metrics(groups)
        if metrics:
            self._steps[step] = metrics
        by_name = {t.episode_id: t for g in groups for t in g.trajectories}
        for row in rows(groups):
            example = {
                "step": step,
                **{k: v for k, v in row.items() if k != "rule"},
                **_around(by_name[row["episode"]]),
            }
            self._examples.setdefault(row["rule"], deque(maxlen=EXAMPLES_PER_RULE)).append(example)
        return metrics

    def write(self) -> bool:
        """Write the file, whole or not at all; returns whether there is one.

        Raises:
            OSError: it cannot be written.
        """
        if not self._steps:
            return False
        content = {
            "steps": {str(step): rates for step, rates in sorted(self._steps.items())},
            "examples": {rule: list(kept) for rule, kept in sorted(self._examples.items())},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".tmp")
        half.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        half.replace(self.path)
        return True


def _around(t: Trajectory) -> Mapping[str, Any]:
    """What was asked, and how it ended."""
    user = next((m.content for m in t.messages if m.role == "user"), "")
    last = next((m.content for m in reversed(t.messages) if m.role == "assistant"), "")
    return {"request": cut(user, _MAX_MESSAGE), "last answer": cut(last, _MAX_MESSAGE), "turns": len(t.turns)}
