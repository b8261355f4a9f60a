"""How a task is graded by a command: what a task's metadata says of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from composer.errors import TaskError
from composer.types import Task

REPORTS = ("exit_code", "pytest", "junit", "reward")
_KEY = "grading"


@dataclass(frozen=True)
class Recipe:
    """How a task is graded; `to_metadata` puts it into a task."""

    command: str
    """A shell's command line; `{report}` in it is the path where a JUnit report is expected."""
    report: str = "exit_code"
    """exit_code: 0 is right; pytest, junit: what they say of the tests below; reward: the number in `report_path`."""
    report_path: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    """pytest's node ids. All of both lists must pass; without any, all tests that ran, and the exit code is 0."""
    patch: str = ""
    """The hidden file that is no file but a diff of the base state."""
    hidden_folder: str = ""
    """Where hidden files go; "": the working directory."""
    restores_tests: bool = True
    """Whether the agent's changes of tests, of their configuration and of what runs them are undone (`clean_state`).
    Without it, only those are that would be imported in the place of the runner's own modules."""
    restored: tuple[str, ...] = ()
    """Patterns (`tools/*.sh`) of more files that decide: the agent's changes of them are undone too."""
    kept: tuple[str, ...] = ()
    """Patterns of files that the agent is to change although they look as if they decided (`Makefile`)."""
    timeout_s: float = 0.0
    """Wall time of the command; 0: that of the task's metadata (`timeout_s`), or the grader's own."""

    def to_metadata(self) -> dict[str, Any]:
        """What a task's metadata takes up; JSON-ready."""
        return {_KEY: dataclasses.asdict(self)}

    @classmethod
    def of(cls, task: Task) -> Recipe:
        """The recipe in a task's metadata.

        Raises:
            TaskError: there is none, or it is not as it has to be.
        """
        try:
            recipe = cls(**task.metadata[_KEY])
        except KeyError:
            raise TaskError(
                f"Task {task.id} does not say how it is graded: its metadata needs {_KEY!r}, "
                "or its env another grader than CommandGrader."
            ) from None
        except TypeError as error:
            raise TaskError(f"Task {task.id}: metadata[{_KEY!r}] is no recipe of CommandGrader ({error}).") from None
        if recipe.report not in REPORTS:
            raise TaskError(f"Task {task.id}: report={recipe.report!r} must be one of {', '.join(REPORTS)}.")
        if recipe.patch and recipe.patch not in task.hidden_tests:
            raise TaskError(f"Task {task.id}: its patch {recipe.patch!r} is none of its hidden files.")
        return recipe
