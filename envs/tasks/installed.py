"""Taskset `installed`: tasks on repositories for which `composer autoinstall` made environments.

Each environment's repository gets the tasks of another taskset, `feature_deletion` or `bug_injection`, and each task
names the environment as its image: `envs.sandbox.installed` starts it from there, with what the repository needs.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task
from envs.tasks.bug_injection import BugInjectionTaskset
from envs.tasks.feature_deletion import FeatureDeletionTaskset
from envs.tasks.finite import FiniteTaskset
from envs.tasks.repository import TEST_COMMAND

KINDS = {"feature_deletion": FeatureDeletionTaskset, "bug_injection": BugInjectionTaskset}
_RECORD, _FILES = "environment.yaml", "repository"
logger = logging.getLogger(__name__)


class InstalledTaskset(FiniteTaskset):
    """Tasks `<environment>/<key of the other taskset>`."""

    def __init__(
        self,
        path: str | None = None,
        kind: str = "feature_deletion",
        name: str = "installed",
        test_command: str = TEST_COMMAND,
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the repositories of the environments.

        Args:
            path: an environment's folder, or one with many (`installed/`); None: there are no tasks yet.
            kind: of tasks, of `KINDS`. A repository of which none can be made is left out, with a warning.
            name: begins the tasks' ids.
            test_command: as of the taskset of this kind.
            evaluation_share: how much of the tasks is for evaluation, 0 to 1.
            seed: changes their order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: there is no environment, none of them has tasks, or another value is refused.
            TaskError: a repository cannot be read.
        """
        if kind not in KINDS:
            raise ConfigError("env.taskset.args.kind", kind, f"must be one of {', '.join(KINDS)}")
        self.name, self._path = name, path
        self._inside: dict[str, FeatureDeletionTaskset | BugInjectionTaskset] = {}
        refused = ""
        for folder in _environments(path) if path is not None else []:
            try:
                self._inside[folder.name] = KINDS[kind](
                    str(folder / _FILES),
                    name=name,
                    image=f"environment:{folder}",
                    test_command=test_command,
                    evaluation_share=evaluation_share,
                )
            except ConfigError as error:
                if error.key != "env.taskset.args.path":
                    raise
                refused = error.remedy
                logger.warning("Environment %s has no %s tasks: %s", folder, kind, error.remedy)
        if path is not None and not self._inside:
            raise ConfigError("env.taskset.args.path", path, refused or "there is no environment in it")
        fixed = {
            f"{environment}/{key}": split
            for environment, taskset in self._inside.items()
            for split in Split
            for key in taskset.keys(split)
        }
        super().__init__(
            fixed, evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, fixed=fixed
        )

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` of a split; see `FiniteTaskset.task`.

        Raises:
            IndexError: there is no such task.
            TaskError: the task cannot be made, or no environment was named.
        """
        if self._path is None:
            raise TaskError(
                "there is no folder of environments: give env.taskset.args.path one that `composer autoinstall` made"
            )
        return super().task(split, index)

    def reference(self, task: Task) -> dict[str, bytes]:
        """The files of a right solution.

        Raises:
            TaskError: the task is not of this taskset.
        """
        environment, _, key = self._key(task).partition("/")
        split = next(s for s in Split if task.id.startswith(self._id("", s)))
        return self._inside[environment].reference(dataclasses.replace(task, id=self._id(key, split)))

    def _make(self, key: str, split: Split) -> Task:
        environment, _, inner = key.partition("/")
        task = self._inside[environment]._make(inner, split)
        return dataclasses.replace(
            task, id=self._id(key, split), metadata={**task.metadata, "environment": environment}
        )


def _environments(path: str) -> list[Path]:
    """The environments' folders.

    Raises:
        ConfigError: there is no such folder.
    """
    root = Path(path).expanduser().absolute()
    if (root / _RECORD).is_file():
        return [root]
    try:
        return sorted(p for p in root.iterdir() if (p / _RECORD).is_file() and (p / _FILES).is_dir())
    except OSError as error:
        raise ConfigError(
            "env.taskset.args.path", path, f"name an environment's folder, or one with many ({error.strerror})"
        ) from None
