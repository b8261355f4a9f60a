"""The look before a run, with real sandboxes and the real grader."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.errors import MachineError, TaskError
from composer.rollout.episode import Rubric
from composer.rollout.preflight import check_sight, check_tasks, sources
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks.micro import MicroTaskset


class Solved(MicroTaskset):
    def task(self, split, index):
        task = super().task(split, index)
        return dataclasses.replace(task, files=self.reference(task))


class WrongReference(MicroTaskset):
    def reference(self, task):
        return task.files


def with_backend(look: Callable) -> None:
    async def run() -> None:
        backend = BubblewrapBackend("preflight")
        try:
            await look(backend)
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        (MicroTaskset(), ""),
        (
            Solved(),
            "^taskset 'micro': The hidden tests of task micro/train/0 pass on its base state.*break its `files`",
        ),
        (
            WrongReference(),
            "^taskset 'micro': The hidden tests of task micro/train/0 fail on its reference: test_hidden.py::"
            "test_case_1: failed in call: AssertionError .*; mend the reference or the tests.$",
        ),
    ],
    ids=["right", "solved", "wrong reference"],
)
def test_tasks_are_looked_at(taskset: MicroTaskset, message: str) -> None:
    def look(backend):
        return check_tasks(taskset, Rubric({"hidden_tests": PytestGrader()}), backend, 60.0)

    if not message:
        with_backend(look)
        return
    with pytest.raises(TaskError, match=message):
        with_backend(look)


def test_what_a_run_is_made_of_is_out_of_sight_and_what_lies_in_usr_is_not(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("secret")
    ours = [config, *sources([MicroTaskset(), PytestGrader(), Solved()])]
    assert len(ours) == 4
    with_backend(lambda backend: check_sight(dict.fromkeys(ours, "move it"), backend, SandboxLimits()))
    with pytest.raises(
        MachineError, match="^/usr/bin/env can be read in the agent's sandbox, and must not be: move it$"
    ):
        with_backend(lambda backend: check_sight({Path("/usr/bin/env"): "move it"}, backend, SandboxLimits()))
