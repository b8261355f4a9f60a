"""What follows from findings. The only part of the monitor that knows of rewards, and it does not look for anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from composer.binding import suggest
from composer.choices import MonitorEffect
from composer.endpoints import check_endpoint
from composer.errors import ConfigError
from composer.monitor.evidence import Finding, Kind, cut
from composer.monitor.rules import RULES
from composer.schema import MonitorConfig
from composer.types import Trajectory

KEY = "monitor"
"""Of a trajectory's metadata."""
JUDGE = "judge"
"""The rule's name of a finding of the judge."""
UNJUDGED = "unjudged"
"""That of an episode which the judge should have seen."""
_SEVERITY = list(MonitorEffect)
_MAX_KEPT = 20
"""Findings that an episode's record holds."""


@dataclass
class Report:
    """What was found in one episode."""

    findings: list[Finding] = field(default_factory=list)
    judged: bool | None = None
    """Whether the judge has answered; None: it was not asked."""
    cause: str = ""
    """Why it has not."""
    baits: int = 0
    """How many lay there."""


def check_monitor(monitor: MonitorConfig) -> None:
    """Refuse names of rules and kinds that there are none of, and a judge that cannot be asked.

    Raises:
        ConfigError: names the key.
    """
    names = [*Kind, *RULES]
    special = {JUDGE, UNJUDGED}
    for key, given, known in (
        ("effects", monitor.effects, {*names, *special}),
        ("off", monitor.off, {*names}),
    ):
        for name in given:
            if name not in known:
                hint = suggest(name, names)
                meant = f"did you mean {str(hint)!r}?" if hint else f"there are {', '.join(names)}"
                raise ConfigError(f"env.monitor.{key}", name, f"no such rule or kind; {meant}")
    judge = monitor.judge
    if judge.url is not None:
        check_endpoint("env.monitor.judge.url", judge.url)
        if not judge.model:
            raise ConfigError("env.monitor.judge.model", judge.model, "name the model that the judge's address serves")
    for kind, place in monitor.honeypots.places.items():
        if kind not in [k.value for k in monitor.honeypots.kinds]:
            raise ConfigError(
                f"env.monitor.honeypots.places.{kind}", place, "its kind is none of `kinds`: add it there"
            )
        if not place.startswith(("/", "~/")) or ".." in place.split("/"):
            raise ConfigError(f"env.monitor.honeypots.places.{kind}", place, "write an absolute path, or one from `~/`")


def effect_of(finding: Finding, monitor: MonitorConfig) -> MonitorEffect:
    """What the config says of a finding; of the judge's, no more than `judge.effect`."""
    if finding.rule == UNJUDGED:
        return MonitorEffect.flag
    effect = monitor.effects.get(finding.rule) or monitor.effects.get(finding.kind) or monitor.effect
    if finding.rule == JUDGE:
        return min(effect, monitor.judge.effect, key=_SEVERITY.index)
    return effect


def severest(findings: Iterable[Finding], monitor: MonitorConfig) -> MonitorEffect | None:
    """The effect that counts; None without findings."""
    return max((effect_of(f, monitor) for f in findings), key=_SEVERITY.index, default=None)


def settle(t: Trajectory, report: Report, monitor: MonitorConfig) -> None:
    """Write what was found into an episode's record, and change its reward as the config says.

    An episode without a reward (an infrastructure error) keeps having none. The reward and its parts, as the rubric
    gave them, are kept in the metadata.
    """
    effect = severest(report.findings, monitor)
    record: dict[str, Any] = {
        "findings": [asdict(f) for f in report.findings[:_MAX_KEPT]],
        "kinds": sorted({f.kind.value for f in report.findings if f.rule != UNJUDGED}),
        "effect": effect.value if effect else "",
        "judged": report.judged,
        "baits": report.baits,
    }
    if report.cause:
        record["cause"] = cut(report.cause)
    if t.reward is not None and effect not in (None, MonitorEffect.flag):
        record |= {"reward": t.reward, "rewards": dict(t.rewards)}
        t.reward = _changed(t.reward, effect, monitor.penalty)
        if t.reward is None:
            named = sorted({f.rule for f in report.findings if effect_of(f, monitor) is MonitorEffect.quarantine})
            t.quarantine = f"the cheat monitor has it in quarantine ({', '.join(named)})"
            t.rewards.clear()
    t.metadata[KEY] = record


def _changed(reward: float, effect: MonitorEffect | None, penalty: float) -> float | None:
    if effect is MonitorEffect.penalty:
        return max(min(0.0, reward), reward - penalty)
    return None if effect is MonitorEffect.quarantine else min(0.0, reward)


def record_of(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The monitor's record in a trajectory's metadata; None if nobody has looked."""
    record = metadata.get(KEY)
    return record if isinstance(record, Mapping) and "findings" in record else None
