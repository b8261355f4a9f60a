"""Config group `env`: tasks, tools and graders of episodes, and the machine they happen on."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from composer.choices import ChatTemplate
from composer.schema.fields import BYTES, LARGE, LEAST_SECONDS, LENGTH, SECONDS, STEPS, TargetConfig, number, text
from composer.schema.monitor import MonitorConfig


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of every sandbox (`composer.contract.SandboxLimits`); one that cannot be applied stops the start."""

    memory_bytes: int = number(512 * 2**20, 32 * 2**20, BYTES)
    """Of all processes of a sandbox together."""
    num_processes: int = number(64, 1)
    """Processes and threads at a time."""
    file_bytes: int = number(64 * 2**20, 4096, BYTES)
    """Largest single file."""
    disk_bytes: int = number(256 * 2**20, 2**20, BYTES)
    """Everything written to the sandbox's own file system; with bubblewrap at most half of `memory_bytes`."""
    cpu_seconds: int = number(60, 1, STEPS)
    """CPU time of any one process."""
    exec_timeout_s: float = number(30.0, LEAST_SECONDS, SECONDS)
    """Wall time of one command."""
    lifetime_s: float = number(600.0, LEAST_SECONDS, SECONDS)
    """Wall time of a sandbox; at least `episode_timeout_s`."""
    output_bytes: int = number(64 * 2**10, 256, BYTES)
    """Kept of one command's output."""


@dataclass(frozen=True)
class EnvConfig:
    """Tasks, tools and ending of an episode, and the machine it happens on."""

    name: str = text(plain=True)
    """Shown in records."""
    taskset: TargetConfig = MISSING
    """Where tasks come from (`composer.contract.Taskset`)."""
    tools: dict[str, TargetConfig] = field(default_factory=dict)
    """What the model may call, by a name of your choice (`composer.contract.Tool`)."""
    graders: dict[str, TargetConfig] = field(default_factory=dict)
    """The rubric; a grader's weight stands in `grader_weights` (1.0 if absent)."""
    grader_weights: dict[str, float] = field(default_factory=dict, metadata={"minimum": 0, "maximum": LARGE})
    """Weights of graders in the reward."""
    sandbox: TargetConfig = MISSING
    """The backend that starts sandboxes (`composer.contract.SandboxBackend`)."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Of every sandbox."""
    system_prompt: str = text("", may_be_empty=True)
    """Text before the tools' description; may be empty."""
    prompt_dropout: float = number(0.0, 0, 1)
    """Share of training groups, and of the expert's sessions, without the system message (prompt and tools)."""
    chat_template: ChatTemplate = ChatTemplate.compact
    """How messages and tool calls become text."""
    max_turns: int = number(8, 1)
    """Requests to the generator in one episode."""
    max_turn_tokens: int = number(128, 4, LENGTH)
    """Tokens one turn may generate."""
    max_observation_bytes: int = number(4096, 16, BYTES)
    """A tool result is cut in the middle beyond this."""
    invalid_calls_allowed: int = number(0, 0)
    """How many malformed tool calls are answered with an error before the episode ends."""
    episode_timeout_s: float = number(120.0, LEAST_SECONDS, SECONDS)
    """Wall time of one episode, grading included."""
    concurrency: int = number(32, 1)
    """Episodes at a time in one env worker."""
    num_workers: int = number(1, 1)
    """Env workers (processes)."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Looks for cheating in finished episodes."""
