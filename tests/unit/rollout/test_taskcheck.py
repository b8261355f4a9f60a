"""The check of a taskset: every verdict, with graders whose answers are known."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from dataclasses import replace

import pytest
from stand_in import StandInBackend, StandInSandbox

from composer.contract import ExecResult, Grade
from composer.errors import SandboxError
from composer.rollout.episode import Rubric
from composer.rollout.taskcheck import (
    CheckSettings,
    TaskCheck,
    TasksetCheck,
    Verdict,
    check_taskset,
    check_to_dict,
    render_check,
)
from composer.types import Split, Task


class Tasks:
    """`state` says what a state is worth; the reference says 1.0 where nothing else is wished."""

    name = "tasks"

    def __init__(self, num: int = 1, base: bytes = b"0", right: object = b"1", image: str = "") -> None:
        self.num, self.base, self.right, self.image = num, base, right, image

    def task(self, split, index):
        if index >= self.num:
            raise IndexError(index)
        return Task(f"tasks/{split}/{index}", "", {"state": self.base}, {}, self.image)

    def reference(self, task):
        if isinstance(self.right, Exception):
            raise self.right
        return None if self.right is None else {"state": self.right}


class StateGrader:
    """Scores what `state` says; of several numbers, one after the other for ever."""

    name = "state"
    memoise = True

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.error, self.seconds, self.calls, self.at_once, self.most_at_once = error, seconds, [], 0, [0]
        self.remembered: list[bool] = []

    async def grade(self, task, files, backend, trajectory) -> Grade:
        self.remembered.append(self.memoise)
        self.calls.append((task.id, files["state"]))
        self.at_once += 1
        self.most_at_once.append(self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        if self.error:
            raise self.error
        scores = files["state"].split()
        score = float(scores[(self.calls.count((task.id, files["state"])) - 1) % len(scores)])
        return Grade(score, {"reason": "" if score == 1.0 else f"only {score:g}"})


def check(taskset, grader=None, backend=None, splits=(Split.TRAIN,), weights=None, progress=None, **settings):
    rubric = Rubric({"g": grader or StateGrader()}, weights or {})
    options = {"progress": progress} if progress else {}
    settings = CheckSettings(**{"num_tasks": 3, **settings})
    return asyncio.run(check_taskset(taskset, rubric, backend or StandInBackend(), settings, splits=splits, **options))


@pytest.mark.parametrize(
    ("base", "right", "verdict", "reason"),
    [
        (b"0", b"1", Verdict.OK, ""),
        (b"0.5", b"1", Verdict.OK, ""),
        (b"0", None, Verdict.OK, "there is no reference: only the untouched state was graded"),
        (b"1", b"1", Verdict.TRIVIAL, "the untouched state gets the full reward of 1"),
        (b"1", None, Verdict.TRIVIAL, "the untouched state gets the full reward of 1"),
        (b"0", b"0", Verdict.BROKEN_REFERENCE, "only 0"),
        (b"0", b"0.5", Verdict.BROKEN_REFERENCE, "only 0.5"),
        (b"0", b"1 1 1 1 0", Verdict.FLAKY, "the reference was graded 0 x 1, 1 x 4: only 0"),
        (b"0 0 0 0 1", b"1", Verdict.FLAKY, "the untouched state was graded 0 x 4, 1 x 1"),
        (b"0", KeyError(3), Verdict.CANNOT_RUN, "taskset 'tasks' broke in its `reference` on task tasks/train/0 (KeyE"),
        (b"0", "text", Verdict.CANNOT_RUN, "taskset 'tasks': `reference` of task tasks/train/0 made {'state': 'text'}"),
    ],
)
def test_every_verdict(base, right, verdict, reason):
    [task] = check(Tasks(base=base, right=right)).tasks
    assert task.verdict is verdict and task.reason.startswith(reason) and (reason or not task.reason)
    assert task.id == "tasks/train/0"


def test_each_state_is_graded_anew_every_time():
    grader = StateGrader()
    [task] = check(Tasks(base=b"0.5"), grader).tasks
    assert grader.memoise and not any(grader.remembered)
    assert grader.calls == [("tasks/train/0", b"0.5"), ("tasks/train/0", b"1")] * 5
    assert task.untouched == [0.5] * 5 and task.reference == [1.0] * 5
    grader = StateGrader()
    check(Tasks(), grader, rounds=2)
    assert len(grader.calls) == 4


def test_weights_say_what_a_full_reward_is():
    [task] = check(Tasks(right=b"0.5"), weights={"g": 2.0}).tasks
    assert task.verdict is Verdict.BROKEN_REFERENCE and task.reference[0] == 1.0
    [task] = check(Tasks(base=b"1"), weights={"g": 2.0}).tasks
    assert task.reason == "the untouched state gets the full reward of 2"


def test_splits_end_where_they_end_and_progress_is_told():
    told = []
    done = check(Tasks(num=2), splits=tuple(Split), progress=lambda t: told.append(t.id))
    expected = ["tasks/train/0", "tasks/train/1", "tasks/evaluation/0", "tasks/evaluation/1"]
    assert [t.id for t in done.tasks] == expected and sorted(told) == sorted(expected)
    assert done.ok
    [first, *rest] = check(Tasks(num=0)).tasks
    assert not rest and first.verdict is Verdict.CANNOT_RUN and "tasks has no train task 0" in first.reason
    assert not TasksetCheck("tasks", 5, [], 0.0).ok


def test_tasks_that_training_meets_again_are_looked_at_once():
    class Endless(Tasks):
        def task(self, split, index):
            return super().task(split, index % self.num)

        def num_tasks(self, split, *, distinct=False):
            return self.num if distinct else None

    assert [t.index for t in check(Endless(num=2), StateGrader(), num_tasks=5).tasks] == [0, 1]


def test_a_task_that_cannot_be_made_does_not_end_the_split():
    class Holey(Tasks):
        def task(self, split, index):
            if index == 1:
                raise KeyError("hole")
            return super().task(split, index)

    tasks = check(Holey(num=3)).tasks
    assert [t.verdict for t in tasks] == [Verdict.OK, Verdict.CANNOT_RUN, Verdict.OK]
    assert tasks[1].id == "tasks/train/1" and "KeyError('hole')" in tasks[1].reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxError("the sandbox\nis gone"), "the sandbox is gone"),
        (KeyError("x"), "grader 'g' failed on task tasks/train/0 (KeyError('x')"),
        (SandboxError("x" * 999), "x" * 297 + "..."),
    ],
)
def test_what_fails_is_a_reason_and_no_verdict(error, reason):
    [task] = check(Tasks(), StateGrader(error)).tasks
    assert task.verdict is Verdict.CANNOT_RUN and task.reason.startswith(reason) and len(task.reason) <= 300


def test_tasks_run_side_by_side_but_not_too_many():
    grader = StateGrader(seconds=0.01)
    check(Tasks(num=9), grader, num_tasks=9, concurrency=3, rounds=1)
    # The copy that grades shares the list with the original.
    assert max(grader.most_at_once) == 3


def test_deadlines():
    start = time.monotonic()
    [task] = check(Tasks(), StateGrader(seconds=60.0), task_timeout_s=0.1).tasks
    assert (task.verdict, task.reason) == (Verdict.CANNOT_RUN, "its gradings did not end within 0.1 s")
    tasks = check(Tasks(num=3), StateGrader(seconds=60.0), num_tasks=9, deadline_s=0.2, concurrency=1).tasks
    assert [t.reason for t in tasks] == ["it was not done when the check's 0.2 s were over"] * 3
    [task] = check(Tasks(), StateGrader(seconds=60.0), grading_timeout_s=0.1).tasks
    assert "grader 'g' did not end within 0.1 s on task tasks/train/0" in task.reason
    assert time.monotonic() - start < 10.0


class ImageSandbox(StandInSandbox):
    async def exec(self, argv, *, stdin=b"", env=None, timeout_s=None) -> ExecResult:
        assert argv[:2] == ["sh", "-c"]
        if argv[2] == "solve":
            self.content["state"] = self.content["answer"]
            return ExecResult(0, b"")
        return ExecResult(2, b"no\nsuch thing") if argv[2] == "fail" else ExecResult(-9, b"", timed_out=True)


class ImageBackend(StandInBackend):
    async def start(self, files, limits, *, image=""):
        assert image == "tasks:1"
        self.started.append(ImageSandbox(0, {"state": b"0", **files}))
        self.started[-1].files_error = self.files_error
        return self.started[-1]


class InImage(Tasks):
    """The base state is in the image, and a command makes it right."""

    command = "solve"

    def task(self, split, index):
        return replace(super().task(split, index), files={}, image="tasks:1")

    def solver(self, task):
        return {"answer": b"1"}, self.command


def test_base_states_and_solutions_in_images():
    backend, grader = ImageBackend(), StateGrader()
    [task] = check(InImage(right=None), grader, backend).tasks
    assert task.verdict is Verdict.OK and task.reason == ""
    assert [state for _, state in grader.calls[:2]] == [b"0", b"1"]
    assert len(backend.started) == 2 and all(sandbox.stopped for sandbox in backend.started)
    # A reference lies over the files of the image.
    backend = ImageBackend()
    grader = StateGrader()
    [task] = check(InImage(right=b"1"), grader, backend).tasks
    assert task.verdict is Verdict.OK and len(backend.started) == 1
    taskset = InImage(right=None)
    taskset.command = "fail"
    [task] = check(taskset, backend=ImageBackend()).tasks
    assert task.reason == "the solver of task tasks/train/0 ended with exit code 2: no such thing"
    taskset.command = "sleep"
    [task] = check(taskset, backend=ImageBackend()).tasks
    assert task.reason == "the solver of task tasks/train/0 did not end in time: no output"
    backend = ImageBackend(files_error=OSError(errno.EFBIG, "File too large"))
    [task] = check(InImage(), backend=backend).tasks
    assert task.verdict is Verdict.CANNOT_RUN and "File too large" in task.reason and backend.started[0].stopped


CHECK = TasksetCheck(
    "tasks",
    5,
    [
        TaskCheck("tasks/train/0", Split.TRAIN, 0, Verdict.OK, "", 1.25, [0.0] * 5, [1.0] * 5, ["it can be forged"]),
        TaskCheck("tasks/train/1", Split.TRAIN, 1, Verdict.BROKEN_REFERENCE, "r" * 60, 12.0, [0.0], [0.0]),
        TaskCheck("tasks/evaluation/0", Split.EVALUATION, 0, Verdict.OK, "", 0.5),
    ],
    13.0,
)


def test_the_table():
    assert render_check(CHECK, width=80) == [
        "task                verdict           seconds  reason",
        "tasks/train/0       ok                    1.2",
        "tasks/train/1       broken reference     12.0  rrrrrrrrrrrrrrrrrrrrrrrrrrrrrr...",
        "tasks/evaluation/0  ok                    0.5",
        "",
        "train: 2 tasks, 5 rounds each: 1 ok, 1 broken reference",
        "evaluation: 1 tasks, 5 rounds each: 1 ok",
        "beware: 1 of 3 tasks: it can be forged",
    ]
    assert render_check(TasksetCheck("tasks", 5, [], 0.0))[-1] == "tasks has no tasks"


def test_the_dictionary():
    d = json.loads(json.dumps(check_to_dict(CHECK)))
    assert (d["taskset"], d["rounds"], d["num_ok"], d["ok"], d["seconds"]) == ("tasks", 5, 2, False, 13.0)
    assert d["tasks"][0] == {
        "id": "tasks/train/0",
        "split": "train",
        "index": 0,
        "verdict": "ok",
        "reason": "",
        "seconds": 1.25,
        "untouched": [0.0] * 5,
        "reference": [1.0] * 5,
        "doubts": ["it can be forged"],
    }
