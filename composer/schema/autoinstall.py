"""`composer autoinstall`: which repositories, which models, and what they may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer.schema.env import LimitsConfig
from composer.schema.fields import BYTES, LEAST_SECONDS, LENGTH, SECONDS, TOKENS, number, text


@dataclass(frozen=True)
class InstallAgentConfig:
    """A model behind an endpoint that speaks OpenAI's chat completions, and what it may use for one repository."""

    url: str = text("http://127.0.0.1:8000/v1")
    """Where the endpoint is, up to and with its version."""
    model: str = text("default")
    """The name that it knows the model by."""
    api_key_env: str = text("", may_be_empty=True)
    """The environment variable that holds the key; empty: the endpoint asks for none."""
    native_tools: bool = True
    """Whether the endpoint reads tool calls itself; else they are asked for, and read, in the text of the messages."""
    tools: list[str] = field(default_factory=list)
    """Which of `env.tools` it has, by their names there, beside the one with which it hands in."""
    temperature: float = number(0.7, 0, 2)
    """Of sampling."""
    max_turns: int = number(60, 1)
    """Requests for one repository."""
    max_turn_tokens: int = number(4096, 16, LENGTH)
    """Tokens one turn may generate."""
    max_total_tokens: int = number(2_000_000, 64, TOKENS)
    """Tokens of all its requests for one repository, prompts included."""


def _proposer() -> InstallAgentConfig:
    return InstallAgentConfig(tools=["read_file", "list_dir", "glob", "grep"])


def _installer() -> InstallAgentConfig:
    return InstallAgentConfig(tools=["read_file", "list_dir", "glob", "grep", "write_file", "shell"], max_turns=150)


def _limits() -> LimitsConfig:
    return LimitsConfig(
        memory_bytes=4 * 2**30,
        num_processes=256,
        file_bytes=2**30,
        disk_bytes=2 * 2**30,
        cpu_seconds=1800,
        exec_timeout_s=600.0,
        lifetime_s=7200.0,
        output_bytes=16 * 2**20,
    )


@dataclass(frozen=True)
class AutoinstallConfig:
    """Two models make environments of repositories; only `composer autoinstall` reads it."""

    repositories: list[str] = field(default_factory=list)
    """Folders, git bundles (*.bundle) and git URLs. A URL is cloned in a sandbox, which must reach it."""
    output: str = text("environments")
    """Where environments go (`installed/`) and what was found out of the others (`dropped/`)."""
    proposer: InstallAgentConfig = field(default_factory=_proposer)
    """Names the commands. Its sandbox is thrown away, so nothing that it does lasts."""
    installer: InstallAgentConfig = field(default_factory=_installer)
    """Sets up the machine. What it does with `command`s and with whole files goes into the install script."""
    num_commands: int = number(10, 1)
    """That the proposer has to name."""
    num_chosen: int = number(3, 1)
    """Of these, which have to work in the end."""
    tries: int = number(5, 1)
    """How often the installer may hand in."""
    rounds: int = number(2, 1)
    """How often each command is run at every verification, alike every time."""
    command_timeout_s: float = number(300.0, LEAST_SECONDS, SECONDS)
    """Wall time of one of the commands."""
    repository_timeout_s: float = number(7200.0, LEAST_SECONDS, SECONDS)
    """Wall time of everything that is done with one repository; it is dropped after it."""
    request_timeout_s: float = number(300.0, LEAST_SECONDS, SECONDS)
    """Wall time of one attempt of a request to an endpoint."""
    outage_timeout_s: float = number(900.0, LEAST_SECONDS, SECONDS)
    """How long a request is tried again; the repository is then left for another time."""
    max_repository_bytes: int = number(64 * 2**20, 1, BYTES)
    """Of all files of a repository together."""
    concurrency: int = number(1, 1)
    """Repositories at a time."""
    limits: LimitsConfig = field(default_factory=_limits)
    """Of every sandbox in which this happens; those that tasks get stand in `env.limits`."""
