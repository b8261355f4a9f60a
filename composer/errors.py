"""One error type a boundary. Every message names the thing, its value, and the remedy.

The command line prints these as one plain sentence; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno

from composer.redaction import hide, shown_value


class ComposerError(Exception):
    """Base of all errors that a user can act on.

    Attributes:
        exit_code: what the process exits with when this error ends the run.
    """

    exit_code = 1


class ConfigError(ComposerError):
    """A config key is unknown, of the wrong type, out of range, or contradicts another. Nothing has started."""

    exit_code = 2

    def __init__(self, key: str, value: object, remedy: str) -> None:
        """Keep key, value and remedy apart, so that callers can test them one by one; a value of `...` is none.

        The message shows no secret, be it the value or part of it.
        """
        self.key, self.value, self.remedy = key, value, remedy
        shown, remedy = shown_value(key.rpartition(".")[2], value, remedy)
        given = "" if value is ... else f"={shown if len(shown) <= 120 else f'{shown[:117]}...'}"
        super().__init__(hide(f"{key}{given}: {remedy}"))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """Let the error travel from an actor to the driver."""
        return type(self), (self.key, self.value, self.remedy)


class PlanError(ConfigError):
    """The config is well-formed but cannot be run: an impossible mesh, a machine that is too small."""


class MachineError(ComposerError):
    """The machine lacks something: user namespaces, disk space, a free port, a package."""

    exit_code = 3


class CorpusError(ComposerError):
    """A source of the mix is missing, unreadable or empty."""

    exit_code = 3


class TokenizerError(ComposerError):
    """A tokenizer cannot be read or does not fit the model."""


class TrainingError(ComposerError):
    """Training cannot go on: a loss that is not finite, a rank that died."""


class GeneratorError(ComposerError):
    """The rollout engine failed or did not answer before its deadline. Never a reward."""


class EngineDeadError(GeneratorError):
    """A replica answers, but its engine has ended and will answer nothing any more."""


class WeightSyncError(ComposerError):
    """Weights could not be published, loaded, or verified on the generator."""


class SandboxError(ComposerError):
    """The sandbox itself failed (not the program inside it). Never a reward, never shown to the model."""


class SandboxStartError(SandboxError):
    """A sandbox could not be started, or one of its limits could not be applied."""


class SnapshotGoneError(SandboxStartError):
    """The snapshot from which a sandbox was to start was dropped, or went with its backend."""


class ToolCallError(ComposerError):
    """The model's tool call is malformed. It is shown to the model as a tool result."""


class ToolError(ComposerError):
    """A tool broke its contract: a bug in it, or a wait without an end. Never a reward, never shown to the model."""


class TaskError(ComposerError):
    """A task cannot be used: its files or its tests cannot run."""


class GradingError(ComposerError):
    """The grader itself failed. The episode has no reward."""


class LauncherError(ComposerError):
    """The processes of a run could not be started or reached."""


class ClusterError(LauncherError):
    """Ray itself ended under a run, and with it every process of the run."""


class TrackingError(ComposerError):
    """A run's record cannot be sent to MLflow afterwards. Never raised while a run goes on."""


class ResumeError(ComposerError):
    """A run directory cannot be continued."""

    exit_code = 2


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error: it says so itself, one that it came from does, or one of its group."""
    if isinstance(error, BaseExceptionGroup) and any(map(is_disk_full, error.exceptions)):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    behind = error.__cause__ or error.__context__
    return behind is not None and is_disk_full(behind)
