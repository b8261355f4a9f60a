"""Key `env.monitor`: what is looked for in finished episodes, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer.choices import HoneypotKind, MonitorEffect
from composer.schema.fields import BYTES, LARGE, LEAST_SECONDS, LENGTH, SECONDS, number, text


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that looks too. Its outage changes no reward and stops nothing."""

    url: str | None = None
    """Base address of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1; null: no judge."""
    model: str = text("", may_be_empty=True)
    """The model's name there."""
    api_key_env: str | None = None
    """Name of the environment variable with its key, on the machines of the env workers; null: it asks for none."""
    share: float = number(0.1, 0, 1)
    """Of the episodes, by their names: the same ones after a resume."""
    effect: MonitorEffect = MonitorEffect.flag
    """The most that may follow from what it finds: no more than `effects` say for the kind."""
    min_confidence: float = number(0.8, 0, 1)
    """A finding of which it is less certain is left out."""
    timeout_s: float = number(60.0, LEAST_SECONDS, SECONDS)
    """Wall time of judging one episode, all attempts together."""
    attempts: int = number(3, 1, 10)
    """How often it is asked until it answers as it has to."""
    max_input_bytes: int = number(96 * 2**10, 2**10, BYTES)
    """Of an episode; a longer one is shown without parts of its middle."""
    max_answer_tokens: int = number(1024, 64, LENGTH)
    """Of its answer."""
    flag_unjudged: bool = False
    """Whether an episode that it should have judged, and did not, is flagged as `unjudged`."""


@dataclass(frozen=True)
class HoneypotsConfig:
    """Baits in the agent's sandbox that look like leaks; nobody who works on the task comes across them."""

    kinds: list[HoneypotKind] = field(default_factory=list)
    """Which ones."""
    places: dict[str, str] = field(default_factory=dict)
    """Path of a kind's file, absolute or from `~`, where it is not to lie where it lies by default."""
    share: float = number(1.0, 0, 1)
    """Of the episodes that have them, by their names."""


@dataclass(frozen=True)
class MonitorConfig:
    """The cheat monitor. It sees what an episode did and never what that was worth."""

    enabled: bool = False
    """Whether episodes are looked at."""
    effect: MonitorEffect = MonitorEffect.flag
    """What follows from a finding for which `effects` has neither the rule nor the kind."""
    effects: dict[str, MonitorEffect] = field(default_factory=dict)
    """By the name of a rule, or else of a kind (`composer.monitor.rules`)."""
    penalty: float = number(0.5, 0, LARGE)
    """Comes off the reward once, however much was found, where the effect is `penalty`."""
    off: list[str] = field(default_factory=list)
    """Rules and kinds that are not looked for."""
    network: bool = False
    """The sandboxes have a network that the agent may use: what it fetches is no finding."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A language model that looks too."""
    honeypots: HoneypotsConfig = field(default_factory=HoneypotsConfig)
    """Baits."""
