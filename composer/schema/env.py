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
    """Wall time of a task's setup, and then again of its sandbox, which is killed afterwards whoever forgot it: at
    least `episode_timeout_s`. What the framework itself does in it comes on top."""
    output_bytes: int = number(64 * 2**10, 256, BYTES)
    """Kept of one command's output."""


@dataclass(frozen=True)
class PoolConfig:
    """Sandboxes that are kept ready, and the pressure on an env worker's machine at which new ones wait."""

    warm: int = number(2, 0)
    """Sandboxes of a kind (same limits, same image) that are kept ready; 0: each is started when it is needed."""
    idle_s: float = number(60.0, LEAST_SECONDS, SECONDS)
    """A sandbox that nobody has taken for so long is stopped."""
    wait_s: float = number(600.0, LEAST_SECONDS, SECONDS)
    """A start that pressure has held up for longer fails: the episode has no reward."""
    runnable_per_cpu: float = number(16.0, above=0)
    """A start waits while more threads a CPU run or could run."""
    memory_left_bytes: int = number(2**30, 0, BYTES)
    """A start waits while less memory is available."""
    disk_left_bytes: int = number(2**30, 0, BYTES)
    """A start waits while less is free on the disk of temporary files."""


@dataclass(frozen=True)
class AgentFileConfig:
    """A file of the agent's own."""

    path: str = text()
    """Absolute path in the sandbox, outside of its working directory."""
    text: str = text(may_be_empty=True)
    """Its content."""


@dataclass(frozen=True)
class AgentConfig:
    """An agent program that runs in the sandbox in place of the product's own harness (`composer.gateway`).

    In `command` and `environment`, {request} is the task's request, {base_url} where the model answers (OpenAI's
    clients want {base_url}/v1), {api_key} the episode's key, and {model} a name for the model. Of the env's other keys,
    `invalid_calls_allowed` is the product's own harness's; `tools`, `system_prompt` and `max_observation_bytes` are
    that harness's and the scripted expert's, of whose sessions a mix may have a phase.
    """

    command: list[str] = field(default_factory=list)
    """The program and its arguments, as the sandbox knows them; empty: the product's own harness."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables on top of the sandbox's own; the policy can read them, so a secret is refused."""
    files: dict[str, AgentFileConfig] = field(default_factory=dict)
    """What is written before it starts, by a name of your choice."""


@dataclass(frozen=True)
class ProductionConfig:
    """How the tool for the same purpose is in the product that the agent is trained for, where it differs.

    It changes nothing of the tool: `args` does (`name`, `description`, `strict`). The plan shows it, and `composer
    behaviour` reads recorded sessions by it.
    """

    name: str = text("", may_be_empty=True)
    """What production calls it; empty: as here."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments that have another name in production: name here -> name there."""
    lacks: list[str] = field(default_factory=list)
    """Arguments of production's tool that this one does not take."""
    adds: list[str] = field(default_factory=list)
    """Arguments of this one that production's does not take."""
    strict: bool | None = None
    """Whether production's refuses arguments that it does not know; null: as here."""
    description: str = text("", may_be_empty=True)
    """Production's; empty: as here."""
    differs: str = text("", may_be_empty=True)
    """Whatever else is different, in a phrase."""


@dataclass(frozen=True)
class ToolConfig(TargetConfig):
    """A tool: its class, how the model sees it (`args`), and how production's differs."""

    production: ProductionConfig = field(default_factory=ProductionConfig)
    """The same tool in production."""


@dataclass(frozen=True)
class EnvConfig:
    """Tasks, tools and ending of an episode, and the machine it happens on."""

    name: str = text(plain=True)
    """Shown in records."""
    taskset: TargetConfig = MISSING
    """Where tasks come from (`composer.contract.Taskset`)."""
    tools: dict[str, ToolConfig] = field(default_factory=dict)
    """What the model may call, by a name of your choice (`composer.contract.Tool`)."""
    missing_tools: list[str] = field(default_factory=list)
    """Tools of production that this env does not have, by their names there."""
    graders: dict[str, TargetConfig] = field(default_factory=dict)
    """The rubric; a grader's weight stands in `grader_weights` (1.0 if absent)."""
    grader_weights: dict[str, float] = field(default_factory=dict, metadata={"minimum": 0, "maximum": LARGE})
    """Weights of graders in the reward."""
    sandbox: TargetConfig = MISSING
    """The backend that starts sandboxes (`composer.contract.SandboxBackend`)."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Of every sandbox."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Who plays: an agent of somebody else's, or the product's own harness with `tools` and `system_prompt`."""
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
    """Wall time of an agent once its sandbox is ready, and again of the graders. Checkpoints, the monitor's part and
    the wait for room on the machine do not count."""
    concurrency: int = number(32, 1)
    """Episodes at a time in one env worker."""
    num_workers: int = number(1, 1)
    """Env workers (processes)."""
    checkpoint_turns: int = number(0, 0)
    """Turns of an episode between two checkpoints, from which it goes on if the run is interrupted; 0: none. An agent
    program (`agent`) has none."""
    kept_states: float = number(0.0, 0, 1)
    """Share of episodes whose final files are kept in the run directory, for `composer look`."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Of each env worker."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Looks for cheating in finished episodes."""
