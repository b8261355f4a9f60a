"""Config group `algorithm`: how the model learns from episodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from composer.choices import AdvantageKind, LossKind, Schedule
from composer.schema.fields import LARGE, LEAST_SECONDS, LENGTH, SECONDS, STEPS, number, text


@dataclass(frozen=True)
class LengthPenaltyConfig:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), x a weighted sum, comes off the reward (Composer 2 report)."""

    coefficient: float = number(0.0, 0, LARGE)
    """Factor on C(x); 0: no penalty."""
    k: float = number(1.0, above=0, maximum=LARGE)
    """How soon the penalty bends."""
    q: float = number(0.5, 0, LARGE)
    """0: linear; 1: logarithmic; beyond: bounded."""
    generated_tokens: float = number(0.001, 0, LARGE)
    """Weight in x of a generated token."""
    tool_output_tokens: float = number(0.0, 0, LARGE)
    """Weight in x of a token of a tool result."""
    tool_calls: float = number(0.0, 0, LARGE)
    """Weight in x of a tool call."""
    turns: float = number(0.0, 0, LARGE)
    """Weight in x of a turn."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The RL algorithm."""

    name: str = text(plain=True)
    """Shown in plans and records."""
    num_steps: int = number(MISSING, 1, STEPS)
    """Optimizer steps."""
    groups_per_step: int = number(8, 1)
    """Groups (tasks) that make one optimizer step."""
    group_size: int = number(8, 2)
    """Sibling episodes of a task."""
    learning_rate: float = number(MISSING, above=0, maximum=LARGE)
    """Peak, after the warm-up."""
    warmup_steps: int = number(3, 0, STEPS)
    """Optimizer steps from 0 to the peak; less than `num_steps`."""
    schedule: Schedule = Schedule.constant
    """After the warm-up."""
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    """Where the schedule ends, as a share of the peak."""
    weight_decay: float = number(0.0, 0, LARGE)
    """AdamW's, decoupled."""
    beta1: float = number(0.9, 0, 0.9999)
    """Adam's decay of the first moment."""
    beta2: float = number(0.95, 0, 0.99999)
    """Adam's decay of the second moment."""
    max_grad_norm: float = number(1.0, above=0, maximum=LARGE)
    """The gradient's global norm is clipped to this."""
    temperature: float = number(1.0, 0.01, 2)
    """Of sampling in training episodes, and of the probabilities in loss and KL penalty; vLLM takes no other."""
    advantage: AdvantageKind = AdvantageKind.mean_centered
    """From the rewards of a group."""
    loss: LossKind = LossKind.clipped
    """On every generated token."""
    clip_low: float = number(0.2, above=0, maximum=1)
    """The ratio is clipped at 1 - this."""
    clip_high: float = number(0.28, above=0, maximum=LARGE)
    """The ratio is clipped at 1 + this."""
    importance_cap: float = number(2.0, 1, LARGE)
    """Cap of a token's ratio of trainer to generator probability in the `cispo` loss; `clipped` has its own bounds."""
    entropy_coefficient: float = number(0.0, 0, LARGE)
    """Weight of the entropy bonus; 0: none."""
    kl_coefficient: float = number(0.0, 0, LARGE)
    """Weight of the k1 estimate of KL(policy || reference), put into the reward (Composer 2 report)."""
    max_staleness: int = number(1, 0)
    """Trainer version minus the oldest version in a group; one that exceeds it when its turn comes is dropped."""
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    """Subtracted from the reward."""
    microbatch_tokens: int = number(8192, 16, LENGTH)
    """Padded tokens of one forward and backward pass on one rank."""
    min_start_average: float = number(0.0, 0, 1)
    """Refuse to start RL when average@k before it is lower: a policy that never succeeds learns nothing."""
    group_timeout_s: float = number(300.0, LEAST_SECONDS, SECONDS)
    """A group not finished by then is dropped, counted, and replaced by a new task."""
    checkpoint_every: int = number(5, 1, STEPS)
    """Optimizer steps between checkpoints; what an interruption can cost."""
