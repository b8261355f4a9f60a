"""The grader with real pytest processes; isolation is tested with the real sandbox under tests/integration."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from composer.contract import ExecResult
from composer.errors import GradingError, SandboxError, TaskError
from composer.types import Split, Task
from envs.grading import pytest_grader
from envs.grading.pytest_grader import PytestGrader, expected_tests
from envs.tasks.micro import MicroTaskset

sys.path.insert(0, str(Path(__file__).parent))
from folder_stand_in import FolderBackend, FolderSandbox  # noqa: E402

TASKSET = MicroTaskset()
TASK = TASKSET.task(Split.TRAIN, 2)
RIGHT = TASKSET.reference(TASK)


def with_tests(source: str, main: str = "x = 1\n") -> Task:
    return Task("t/train/0", "", {"main.py": main.encode()}, {"test_hidden.py": source.encode()})


def grade(task, files, grader=None, backend=None):
    return asyncio.run((grader or PytestGrader()).grade(task, files, backend or FolderBackend()))


def test_expected_tests_are_found_in_the_source():
    source = """
import unittest
def test_a(): pass
async def test_b(): pass
def helper(): pass
class TestC:
    def test_d(self): pass
    class TestE:
        def test_f(self): pass
    def helper(self): pass
class Case(unittest.TestCase):
    def testG(self): pass
class Other:
    def test_no(self): pass
"""
    task = Task("t", "", {}, {"tests/test_x.py": source.encode(), "data.json": b"{}"})
    names = {"test_a", "test_b", "TestC::test_d", "TestC::TestE::test_f", "Case::testG"}
    assert expected_tests(task) == {f"tests/test_x.py::{name}" for name in names}


@pytest.mark.parametrize(
    ("source", "message"),
    [("def helper(): pass", "hold no test function"), ("def test_a(:", "is no Python"), ("\0", "is no Python")],
)
def test_hidden_tests_that_cannot_run_are_the_tasks_fault(source, message):
    with pytest.raises(TaskError, match=message):
        grade(with_tests(source), {})


def test_right_and_wrong():
    assert grade(TASK, RIGHT).score == 1.0
    wrong = grade(TASK, TASK.files)
    assert wrong.score == 0.0 and wrong.details["num_expected"] == 3
    where = "test_hidden.py::test_case_1: failed in call: AssertionError (line 8 of test_hidden.py)"
    assert wrong.details["reason"] == where


def test_configuration_under_a_name_that_is_not_known_is_not_read(monkeypatch):
    forge = {"evil.py": b"raise SystemExit(0)\n", "pytest.ini": b"[pytest]\naddopts = -p evil\n"}
    monkeypatch.setattr(pytest_grader, "clean_state", lambda task, files: {**files, **task.hidden_tests})
    monkeypatch.setattr(pytest_grader, "CONFIG_FILES", frozenset())
    assert grade(TASK, {**RIGHT, **forge}).score == 1.0


def test_the_tasks_own_configuration_is_read():
    config = {"pyproject.toml": b"[tool.pytest.ini_options]\npythonpath = ['src']\n", "src/main.py": b"x = 1\n"}
    task = Task("t", "", config, {"tests/test_hidden.py": b"import main\ndef test_a(): assert main.x\n"})
    assert grade(task, task.files).score == 1.0


def test_a_sandbox_that_hangs_is_not_waited_for(monkeypatch):
    grader, backend = PytestGrader(), FolderBackend()
    grader.limits = dataclasses.replace(grader.limits, lifetime_s=0.1)

    async def hang():
        backend.gate = asyncio.Event()
        await grader.grade(TASK, RIGHT, backend)

    with pytest.raises(GradingError, match="did not end within 0.1 s"):
        asyncio.run(hang())


def test_a_sandbox_without_pytest_is_not_the_agents_fault(monkeypatch):
    async def no_pytest(self, argv, **_):
        return ExecResult(1, b"No module named pytest")

    monkeypatch.setattr(FolderSandbox, "exec", no_pytest)
    with pytest.raises(GradingError, match="exit code 1: No module named pytest.*needs python3 with pytest"):
        grade(TASK, RIGHT)


def test_reports_are_recognised_by_the_same_words_on_both_sides():
    assert f"READY = {pytest_grader.READY!r}".replace("'", '"') in pytest_grader.REPORTER.read_text()


def test_check_wants_a_passing_reference_and_a_failing_base():
    async def check(task, reference):
        await PytestGrader().check(task, reference, FolderBackend())

    asyncio.run(check(TASK, RIGHT))
    with pytest.raises(TaskError, match=r"micro/train/2 fail on its reference: test_hidden.py::test_case_1: failed"):
        asyncio.run(check(TASK, TASK.files))
    with pytest.raises(TaskError, match="pass on its base state"):
        asyncio.run(check(with_tests("def test_a(): pass"), {}))


def test_equal_states_are_graded_once_and_others_are_not():
    grader, backend = PytestGrader(), FolderBackend()

    async def main():
        same = [grader.grade(TASK, dict(reversed(RIGHT.items())), backend) for _ in range(5)]
        verdicts = await asyncio.gather(*same, grader.grade(TASK, TASK.files, backend))
        again = await grader.grade(TASK, {**RIGHT, "conftest.py": b"undone anyway"}, backend)
        return [v.score for v in verdicts], again.score

    assert asyncio.run(main()) == ([1.0] * 5 + [0.0], 1.0)
    assert backend.starts == grader.num_runs == 2
    other = TASKSET.task(Split.TRAIN, 7)
    assert other.hidden_tests != TASK.hidden_tests
    grade(other, RIGHT, grader, backend)
    grade(TASK, RIGHT, grader, FolderBackend())
    assert grader.num_runs == 4, "other tests or another backend: another verdict"
    assert PytestGrader(memoise=False).memoise is False


def test_without_memory_every_state_is_graded():
    grader, backend = PytestGrader(memoise=False), FolderBackend()
    assert [grade(TASK, RIGHT, grader, backend).score for _ in range(2)] == [1.0, 1.0]
    assert backend.starts == 2


def test_the_memory_is_bounded_and_forgets_the_oldest_use():
    grader, backend = PytestGrader(max_verdicts=2), FolderBackend()
    states = [{**RIGHT, "note": bytes([i])} for i in range(3)]
    for i in (0, 1, 0, 2, 0):  # 2 pushes out 1
        grade(TASK, states[i], grader, backend)
    assert backend.starts == 3
    grade(TASK, states[1], grader, backend)
    assert backend.starts == 4


def test_failures_and_timeouts_are_never_remembered():
    grader, backend = PytestGrader(timeout_s=5.0), FolderBackend()
    backend.errors = [SandboxError("gone")]

    async def both():
        return await asyncio.gather(*(grader.grade(TASK, RIGHT, backend) for _ in range(2)), return_exceptions=True)

    assert [str(e) for e in asyncio.run(both())] == ["gone", "gone"], "siblings share the failure"
    assert grade(TASK, RIGHT, grader, backend).score == 1.0 and backend.starts == 2
    slow = PytestGrader(timeout_s=0.5)
    for _ in range(2):
        assert grade(TASK, {"main.py": b"while True: pass"}, slow, backend).score == 0.0
    assert backend.starts == 4


def test_cancelling_one_of_two_leaves_the_other_its_run_and_cancelling_both_ends_it():
    grader, backend = PytestGrader(), FolderBackend()

    async def main():
        backend.gate = asyncio.Event()
        first, second = (asyncio.create_task(grader.grade(TASK, RIGHT, backend)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        backend.gate.set()
        assert (await second).score == 1.0 and first.cancelled() and backend.starts == 1
        backend.gate.clear()
        alone = asyncio.create_task(grader.grade(TASK, TASK.files, backend))
        await asyncio.sleep(0.01)
        alone.cancel()
        await asyncio.sleep(0.01)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(main()) == []
