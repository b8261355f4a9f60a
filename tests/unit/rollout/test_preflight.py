"""What is refused before anything is trained."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from stand_in import LineGrader, StandInBackend, StandInSandbox

from composer.contract import SandboxLimits
from composer.errors import GradingError, MachineError, SandboxError, TaskError
from composer.rollout.episode import Rubric
from composer.rollout.preflight import check_sight, check_tasks, sources
from composer.types import Split, Task


class Tasks:
    """`main.py` says 1 and should say 2."""

    name = "tasks"
    base = b"\n1\n"

    def task(self, split, index):
        return Task(f"tasks/{split}/{index}", "", {"main.py": self.base}, {})


class WithReference(Tasks):
    right: object = b"\n2\n"

    def reference(self, task):
        if isinstance(self.right, Exception):
            raise self.right
        return {"main.py": self.right}


class Checking(LineGrader):
    """Says what it is asked, and raises what it is told to."""

    def __init__(self, expected: str, trouble: Exception | None = None, pause_s: float = 0.0) -> None:
        super().__init__(expected)
        self.trouble, self.pause_s, self.asked = trouble, pause_s, []

    async def check(self, task, reference, backend) -> None:
        self.asked.append((task.id, reference))
        await asyncio.sleep(self.pause_s)
        if self.trouble:
            raise self.trouble


def check(taskset, *graders, weights=None, timeout_s=5.0):
    rubric = Rubric({f"g{n}": g for n, g in enumerate(graders)}, weights or {})
    asyncio.run(check_tasks(taskset, rubric, StandInBackend(), timeout_s))


def test_a_task_that_can_be_solved_is_accepted_and_both_splits_are_looked_at():
    plain, checking = LineGrader("2"), Checking("2")
    check(Tasks(), plain, checking)
    assert [files["main.py"] for files in plain.seen] == [b"\n1\n"] * 2
    assert checking.asked == [(f"tasks/{split}/0", None) for split in Split]
    checking = Checking("2")
    check(WithReference(), checking)
    assert [reference for _, reference in checking.asked] == [{"main.py": b"\n2\n"}] * 2


def test_untouched_files_with_the_full_reward_are_refused():
    message = (
        "^taskset 'tasks': the untouched files of task tasks/train/0 get the full reward of 1, so there is nothing"
    )
    with pytest.raises(TaskError, match=message):
        check(Tasks(), LineGrader("1"))
    # A part of the reward may be there from the beginning, and a malus does not count.
    check(Tasks(), LineGrader("1"), LineGrader("2"))
    with pytest.raises(TaskError, match="full reward of 0.5"):
        check(Tasks(), LineGrader("1"), LineGrader("2"), weights={"g0": 0.5, "g1": -1.0})


def test_what_a_grader_says_of_a_task_names_the_taskset():
    trouble = TaskError("The hidden tests of task tasks/train/0 fail on its reference: x; mend it.")
    with pytest.raises(
        TaskError, match="^taskset 'tasks': The hidden tests of task tasks/train/0 fail on its ref.*mend"
    ):
        check(Tasks(), Checking("2", trouble))
    with pytest.raises(SandboxError, match="^gone$"):
        check(Tasks(), Checking("2", SandboxError("gone")))
    with pytest.raises(
        GradingError, match=r"grader 'g0' broke on task tasks/train/0 \(KeyError\(7\)\): mend its `check`"
    ):
        check(Tasks(), Checking("2", KeyError(7)))
    with pytest.raises(GradingError, match="grader 'g0' did not check task tasks/train/0 within 0.1 s"):
        check(Tasks(), Checking("2", pause_s=5.0), timeout_s=0.1)


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (KeyError("x"), r"taskset 'tasks' broke in its `reference` on task tasks/train/0 \(KeyError\('x'\)\): mend it"),
        (TaskError("as it is"), "^as it is$"),
        ("text", r"it made \{'main.py': 'text'\}, which is no dictionary of paths and bytes"),
    ],
)
def test_a_reference_that_breaks_is_the_tasksets_fault(right, message):
    taskset = WithReference()
    taskset.right = right
    with pytest.raises(TaskError, match=message):
        check(taskset, Checking("2"))


class SeesTheHost(StandInSandbox):
    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        return Path(path).read_bytes()[:max_bytes]


class BackendOfHost(StandInBackend):
    async def start(self, files, limits):
        self.started.append(SeesTheHost(0, files))
        return self.started[-1]


def test_private_files_that_a_sandbox_shows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("secret")

    def look(backend, private):
        asyncio.run(check_sight(private, backend, SandboxLimits()))
        return [sandbox.stopped for sandbox in backend.started]

    assert look(StandInBackend(), {file: "move it"}) == [True]
    assert look(BackendOfHost(), {}) == [True]
    backend = BackendOfHost()
    with pytest.raises(MachineError, match=f"^{file} can be read in the agent's sandbox, and must not be: move it$"):
        look(backend, {tmp_path: "is a folder", file: "move it"})
    assert backend.started[0].stopped


def test_another_file_of_the_same_name_is_no_sight_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("secret")
    backend, other = StandInBackend(), StandInSandbox(0, {str(file): b"their own"})

    async def start(files, limits):
        return other

    backend.start = start
    asyncio.run(check_sight({file: "move it"}, backend, SandboxLimits()))


def test_the_sources_of_parts(tmp_path: Path) -> None:
    assert sources([Tasks(), WithReference(), LineGrader("x"), 1, dataclasses]) == sorted(
        {Path(__file__).resolve(), Path(__file__).resolve().with_name("stand_in.py")}
    )
