"""The dataclasses behind every config file: what each key means, its unit, its range. A file a config group or two.

`binding.py` merges what Hydra composed into `Config` a second time, strictly, so that nothing unknown, of a wrong type
or out of range goes further. Ranges stand in the field's metadata (`number`), relations between keys in `checks/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from composer.choices import (
    Accelerator,
    AdvantageKind,
    ChatTemplate,
    Dtype,
    Family,
    HoneypotKind,
    LossKind,
    MonitorEffect,
    PhaseKind,
    Schedule,
    ScoreFunction,
    SourceKind,
    Stage,
    SyncMethod,
)
from composer.schema.algorithm import AlgorithmConfig, LengthPenaltyConfig
from composer.schema.autoinstall import AutoinstallConfig, InstallAgentConfig
from composer.schema.env import (
    AgentConfig,
    AgentFileConfig,
    EnvConfig,
    LimitsConfig,
    PoolConfig,
    ProductionConfig,
    ToolConfig,
)
from composer.schema.fields import TargetConfig, number, text
from composer.schema.mix import MixConfig, PhaseConfig, SessionsConfig, SourceConfig
from composer.schema.model import ModelConfig
from composer.schema.monitor import HoneypotsConfig, JudgeConfig, MonitorConfig
from composer.schema.running import EvaluationConfig, GeneratorConfig, ParallelConfig, TrackingConfig, WeightSyncConfig

__all__ = [
    "Accelerator",
    "AdvantageKind",
    "AgentConfig",
    "AgentFileConfig",
    "AlgorithmConfig",
    "AutoinstallConfig",
    "InstallAgentConfig",
    "ChatTemplate",
    "Config",
    "Dtype",
    "EnvConfig",
    "EvaluationConfig",
    "Family",
    "GeneratorConfig",
    "HoneypotKind",
    "HoneypotsConfig",
    "JudgeConfig",
    "LengthPenaltyConfig",
    "LimitsConfig",
    "LookConfig",
    "PoolConfig",
    "LossKind",
    "MixConfig",
    "ModelConfig",
    "MonitorConfig",
    "MonitorEffect",
    "ParallelConfig",
    "PhaseConfig",
    "PhaseKind",
    "ProductionConfig",
    "Schedule",
    "ScoreFunction",
    "SessionsConfig",
    "SourceConfig",
    "SourceKind",
    "Stage",
    "SyncMethod",
    "TargetConfig",
    "ToolConfig",
    "TrackingConfig",
    "WeightSyncConfig",
]


@dataclass(frozen=True)
class LookConfig:
    """Only `composer look` reads it."""

    state: str = text("", may_be_empty=True)
    """A file in a folder `episodes/<stage>/states` of a run, or beside a checkpoint."""
    command: str = text("", may_be_empty=True)
    """A command line for a shell in it; empty: those that are typed."""


@dataclass(frozen=True)
class Config:
    """Everything a run is."""

    seed: int = number(0, 0, 2**31 - 1)
    """Of weights, data order, tasks and sampling. NumPy's end at 2^32, and replica i of the generator adds i."""
    run_root: str = "runs"
    """Run directories and the default MLflow database live here; relative to the working directory."""
    resume: str | None = None
    """A run directory to continue."""
    plugins: list[str] = field(default_factory=list)
    """Further package prefixes that `_target_` may name."""
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    """Which stages run, in this order."""
    model: ModelConfig = MISSING
    """`model=` in conf/model, and so on for the groups below."""
    mix: MixConfig = MISSING
    """What the model reads before RL."""
    env: EnvConfig = MISSING
    """Where it acts."""
    algorithm: AlgorithmConfig = MISSING
    """How it learns from acting."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the trainer is spread."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """How rollouts are generated."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How new weights reach the generators."""
    launcher: TargetConfig = MISSING
    """How the Ray cluster comes to be."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where the record goes."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How the model is measured."""
    autoinstall: AutoinstallConfig = field(default_factory=AutoinstallConfig)
    """How environments are made of repositories."""
    look: LookConfig = field(default_factory=LookConfig)
    """Of `composer look`."""
