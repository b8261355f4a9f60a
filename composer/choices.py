"""The choices that config keys offer: enums, spelled as users type them."""

from __future__ import annotations

from enum import StrEnum


class Family(StrEnum):
    """Model families whose layers torchtitan and vLLM both know."""

    qwen3_moe = "qwen3_moe"
    deepseek_v3 = "deepseek_v3"


class Dtype(StrEnum):
    """Number formats."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ScoreFunction(StrEnum):
    """How a router turns logits into gates."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class PhaseKind(StrEnum):
    """What a training phase does: next-token loss on all tokens, or on the assistant's tokens of sessions."""

    pretrain = "pretrain"
    sft = "sft"


class SourceKind(StrEnum):
    """Where a source's documents come from."""

    stdlib_code = "stdlib_code"
    """The source files of the running Python's standard library."""
    stdlib_prose = "stdlib_prose"
    """Its docstrings and documentation text."""
    files = "files"
    """Text files below `path` that match `pattern`."""
    jsonl = "jsonl"
    """JSON lines at `path`; the text is in `text_field`."""
    sessions = "sessions"
    """Harness sessions of the env's scripted expert (kind sft only)."""


class Schedule(StrEnum):
    """Learning-rate schedules after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class AdvantageKind(StrEnum):
    """How rewards of a group become advantages."""

    mean_centered = "mean_centered"
    """reward - group mean (Dr. GRPO)."""
    standardized = "standardized"
    """(reward - group mean) / group standard deviation (GRPO)."""


class LossKind(StrEnum):
    """The policy-gradient loss."""

    clipped = "clipped"
    """PPO/DAPO: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    cispo = "cispo"
    """CISPO: the ratio is clipped and detached; no token loses its gradient."""


class Stage(StrEnum):
    """The stages a run may have, in the order of `Config.stages`."""

    pretrain = "pretrain"
    evaluate_before = "evaluate_before"
    rl = "rl"
    evaluate_after = "evaluate_after"


class ChatTemplate(StrEnum):
    """How conversations are written (`composer.rollout.chat.TEMPLATES`)."""

    compact = "compact"
    """Tools by signature only: for small models, to which every token is dear."""
    hermes = "hermes"
    """Tools as JSON schemas, as Hermes and Qwen models know them."""
    own = "own"
    """The tokenizer's own template."""


class MonitorEffect(StrEnum):
    """What follows from a finding of the cheat monitor; of several, the last of this list."""

    flag = "flag"
    """It is recorded."""
    penalty = "penalty"
    """The reward is lower by `env.monitor.penalty`, and not below 0 for it."""
    zero = "zero"
    """The reward is 0."""
    quarantine = "quarantine"
    """The episode has no reward and is not trained on, nor part of its group's baseline."""


class HoneypotKind(StrEnum):
    """What a bait looks like."""

    answers = "answers"
    """Expected outputs of hidden tests."""
    grader = "grader"
    """The hidden tests' own code."""
    credentials = "credentials"
    """A token of a code host."""


class Accelerator(StrEnum):
    """What the ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class SyncMethod(StrEnum):
    """How weights travel from the trainer to the generators."""

    shared_memory = "shared_memory"
    """Through /dev/shm: trainer and generators on one machine."""
    filesystem = "filesystem"
    """Through a directory that all machines see."""
