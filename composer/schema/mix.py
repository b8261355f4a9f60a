"""Config group `mix`: what the model reads before RL."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from composer.choices import PhaseKind, Schedule, SourceKind
from composer.schema.fields import LARGE, LENGTH, STEPS, TOKENS, number, text


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mix."""

    kind: SourceKind = MISSING
    """Decides which keys below are read."""
    weight: float = number(1.0, above=0, maximum=LARGE)
    """Share of tokens, relative to the other sources of the phase."""
    path: str | None = None
    """files: a folder; jsonl: a file. Relative to the working directory."""
    pattern: str = "**/*"
    """files: a glob below `path`."""
    text_field: str = "text"
    """jsonl: the key of the text."""


@dataclass(frozen=True)
class SessionsConfig:
    """The scripted expert's sessions (sources of kind `sessions`)."""

    num_sessions: int = number(2000, 1, STEPS)
    """Sessions, each on a task of its own; RL begins after these tasks."""
    expert_accuracy: float = number(0.5, 0, 1)
    """Share of sessions in which the expert is right."""


@dataclass(frozen=True)
class PhaseConfig:
    """One training phase of the mix."""

    kind: PhaseKind = MISSING
    """Decides which tokens count in the loss, and what the sources are."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """By a name of your choice."""
    tokens: int = number(MISSING, 1, TOKENS)
    """Tokens to train on, all ranks together; the last batch is whole. Kind sft counts a session, however short, as
    `seq_len` tokens: at most so many go through, and only the assistant's carry loss."""
    seq_len: int = number(MISSING, 16, LENGTH)
    """Tokens of one sequence."""
    batch_size: int = number(MISSING, 1)
    """Sequences per optimizer step, all ranks together."""
    learning_rate: float = number(MISSING, above=0, maximum=LARGE)
    """Peak, after the warm-up."""
    warmup_steps: int = number(10, 0, STEPS)
    """Optimizer steps from 0 to the peak; less than the phase has."""
    schedule: Schedule = Schedule.cosine
    """After the warm-up."""
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    """Where the schedule ends, as a share of the peak."""
    weight_decay: float = number(0.01, 0, LARGE)
    """AdamW's, decoupled."""
    max_grad_norm: float = number(1.0, above=0, maximum=LARGE)
    """The gradient's global norm is clipped to this."""
    evaluate_every: int = number(50, 1, STEPS)
    """Optimizer steps between evaluations of the codebase loss."""
    checkpoint_every: int = number(50, 1, STEPS)
    """Optimizer steps between checkpoints; what an interruption can cost."""


@dataclass(frozen=True)
class MixConfig:
    """What the model reads before RL, phase by phase, and the held-out codebase that measures it."""

    name: str = text(plain=True)
    """Shown in records."""
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """By name, in order."""
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    """What sources of kind `sessions` hold."""
    codebase: SourceConfig = field(default_factory=lambda: SourceConfig(kind=SourceKind.stdlib_code))
    """Held-out documents: never trained on, their loss is logged at every evaluation."""
    codebase_share: float = number(0.1, above=0, maximum=0.9)
    """Share of the codebase source's documents that are held out."""
    codebase_tokens: int = number(16384, 64, TOKENS)
    """At most this many held-out tokens are scored at an evaluation."""
