"""The grader with real pytest processes; isolation is tested with the real sandbox under tests/integration."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from composer.contract import ExecResult
from composer.errors import GradingError, SandboxError, TaskError
from composer.types import Split, Task
from envs.grading import pytest_grader
from envs.grading.hidden_tests import expected_tests, runs_apart
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.warm import serves
from envs.tasks.micro import MicroTaskset

sys.path.insert(0, str(Path(__file__).parent))
from folder_stand_in import FolderBackend, FolderSandbox  # noqa: E402

TASKSET = MicroTaskset()
APART = TASKSET.task(Split.TRAIN, 2)
RIGHT = TASKSET.reference(APART)
TOGETHER = b"from main import scale_row\n\n\n" + b"".join(
    b"def test_case_%d():\n    assert scale_row(%d, 3) == %d\n" % (n, n + 3, 3 * n + 9) for n in (1, 2, 3)
)
TASK = dataclasses.replace(APART, hidden_tests={"test_hidden.py": TOGETHER})


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


@pytest.mark.parametrize(("task", "line", "sandboxes"), [(TASK, 5, 1), (APART, 7, 2)], ids=["together", "apart"])
def test_right_and_wrong(task, line, sandboxes):
    backend = FolderBackend()
    right = grade(task, RIGHT, backend=backend)
    assert (right.score, right.details["num_passed"], right.details["reason"]) == (1.0, 3, "")
    assert backend.starts == sandboxes
    wrong = grade(task, task.files)
    assert wrong.score == 0.0 and wrong.details["num_expected"] == 3
    where = f"test_hidden.py::test_case_1: failed in call: AssertionError (line {line} of test_hidden.py)"
    assert wrong.details["reason"] == where


def test_who_imports_the_proxy_runs_apart():
    for line in (
        "from composer_solution import call",
        "import composer_solution as c",
        "def f(): import composer_solution",
    ):
        assert runs_apart(with_tests(f"{line}\ndef test_a(): pass")), line
    for line in ("import main", "from .composer_solution import call", "'import composer_solution'"):
        assert not runs_apart(with_tests(f"{line}\ndef test_a(): pass")), line


PLAIN = """
import pytest
from composer_solution import SolutionRaised, call

def test_values():
    for value in (None, True, 3, 2**100, 1.5, "\\u00e9\\ud800", [1, [2]], {"a": {"b": []}}):
        answer = call("pkg.main.echo", value)
        assert answer == value and type(answer) is type(value)
    assert call("pkg.main.echo", x=(1, 2)) == [1, 2]

def test_what_is_raised():
    with pytest.raises(SolutionRaised, match="^ValueError: no 3$") as caught:
        call("pkg.main.refuse", 3)
    assert (caught.value.kind, caught.value.message) == ("ValueError", "no 3")
    with pytest.raises(SolutionRaised, match="SystemExit"):
        call("pkg.main.leave")
    with pytest.raises(SolutionRaised, match="AttributeError"):
        call("pkg.main.nothing")
    with pytest.raises(SolutionRaised, match="ModuleNotFoundError"):
        call("nowhere.f")
    with pytest.raises(SolutionRaised, match="TypeError: Object of type set is not JSON"):
        call("pkg.main.collect")

def test_it_is_one_process_and_stays_after_that():
    assert [call("pkg.main.count") for _ in range(3)] == [1, 2, 3]
"""
SOLUTION = b"""
import sys
print("what is printed is no answer")
numbers = []
def echo(x): return x
def refuse(x): raise ValueError(f"no {x}")
def leave(): sys.exit(0)
def collect(): return {1}
def count():
    numbers.append(1)
    return len(numbers)
"""


def test_plain_data_and_exceptions_pass_between_the_two():
    verdict = grade(with_tests(PLAIN), {"pkg/main.py": SOLUTION})
    assert verdict.score == 1.0, verdict


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_solution_may_use_processes(method):
    pool = f"""
import multiprocessing
def multiply(pair): return pair[0] * pair[1]
def scale_row(a, b):
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        return pool.map(multiply, [(a, b)])[0]
"""
    verdict = grade(APART, {**RIGHT, "main.py": pool.encode()})
    assert verdict.score == 1.0, verdict


def test_data_beside_the_hidden_tests_and_what_the_base_has_for_tests_is_there():
    source = """
import json
from pathlib import Path
from composer_solution import call
from tests.helper import seven
def test_a(seven_again):
    assert json.loads(Path("tests/cases.json").read_text()) == [7] == [seven()] == [seven_again] == [call("main.f")]
"""
    conftest = b"import pytest\n@pytest.fixture\ndef seven_again(): return 7\n"
    base = {"main.py": b"def f(): pass\n", "tests/helper.py": b"def seven(): return 7\n", "conftest.py": conftest}
    task = Task("t/train/0", "", base, {"tests/test_a.py": source.encode(), "tests/cases.json": b"[7]"})
    changed = {**base, "main.py": b"def f(): return 7\n", "tests/helper.py": b"", "conftest.py": b""}
    verdict = grade(task, changed)
    assert verdict.score == 1.0, verdict


def test_tests_that_cannot_run_apart_are_the_tasks_fault():
    source = "from composer_solution import call\n"
    with pytest.raises(TaskError, match="No module named 'main'.*reach it only by `composer_solution.call`"):
        grade(with_tests(source + "import main\ndef test_a(): pass"), {"main.py": b""})
    task = with_tests(source + "def test_a(): pass")
    task.files["conftest.py"] = b"import main\n"
    with pytest.raises(TaskError, match="t/train/0 ended before.*code 4.*No module named 'main'.*their conftest.py"):
        grade(task, {"main.py": b""})
    broken = with_tests(source + "answer = call('main.f')\ndef test_a(): pass")
    assert grade(broken, {"main.py": b"def f(): return 1"}).score == 1.0
    assert "SolutionRaised: ZeroDivisionError" in grade(broken, {"main.py": b"def f(): 1 / 0"}).details["reason"]


def test_a_solution_that_never_starts_is_not_the_agents_fault(monkeypatch):
    real = FolderSandbox.exec

    async def no_python(self, argv, *, channel=None, **more):
        if argv[2].startswith("composer_serve_"):
            channel.close()
            return ExecResult(127, b"python3: No such file or directory")
        return await real(self, argv, channel=channel, **more)

    monkeypatch.setattr(FolderSandbox, "exec", no_python)
    with pytest.raises(GradingError, match="solution's process could not start.*exit code 127: python3: No such file"):
        grade(APART, RIGHT)


@pytest.mark.parametrize("first", ["tests", "solution"])
def test_a_solution_that_starts_too_late_is_not_the_agents_fault(monkeypatch, tmp_path, first):
    """Whose deadline comes first is chance."""
    real = FolderSandbox.exec

    async def exec(self, argv, *, timeout_s, **more):
        is_late = ("pytest" in argv) == (first == "solution")
        return await real(self, argv, timeout_s=30.0 if is_late else timeout_s, **more)

    async def slow_to_tell(self, argv, *, timeout_s, **more):
        result = await exec(self, argv, timeout_s=timeout_s, **more)
        if result.timed_out and "pytest" in argv:  # the stand-in loses what was printed
            return dataclasses.replace(result, output=result.output + b"composer-solution-awaited\n")
        return result

    slow = tmp_path / "server.py"
    slow.write_text(f"import time\ntime.sleep(60)\n{pytest_grader.SERVER.read_text()}")
    monkeypatch.setattr(pytest_grader, "SERVER", slow)
    monkeypatch.setattr(FolderSandbox, "exec", slow_to_tell)
    with pytest.raises(GradingError, match="solution's process could not start.*needs python3, and the machine time"):
        grade(APART, RIGHT, PytestGrader(timeout_s=2.0))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({f"f{i}": b"" for i in range(5000)}, "5004 files and folders were left behind, of which .* takes 2048"),
        ({f"d{i}/x/y": b"" for i in range(1000)}, "3004 files and folders"),
        ({f"f{i}": b"x" for i in range(2000)} | {"g": bytes(2**20)}, "2260 pages of 4096 bytes"),
    ],
)
def test_more_files_than_a_sandbox_takes_are_a_zero_and_no_failure(more, reason):
    small = PytestGrader(memory_bytes=32 * 2**20)
    backend = FolderBackend()
    verdict = grade(APART, {**RIGHT, **more}, small, backend)
    assert verdict.score == 0.0 and re.match(reason, verdict.details["reason"]), verdict
    assert backend.starts == 0
    large = dataclasses.replace(APART, files={**APART.files, **more})
    assert grade(large, {**RIGHT, **more}, small, backend).score == 1.0, "the task brought them"


def test_a_file_larger_than_a_sandbox_takes_is_a_zero():
    grader = PytestGrader()
    grader.limits = dataclasses.replace(grader.limits, file_bytes=1000)
    verdict = grade(APART, {**RIGHT, "x": bytes(1001)}, grader)
    assert verdict.details["reason"] == (
        "1001 bytes in one file were left behind, of which a grading sandbox takes 1000"
    )


def test_a_sandbox_of_the_solution_that_fails_is_not_the_agents_fault(monkeypatch):
    real = FolderSandbox.exec

    async def gone(self, argv, *, channel=None, **more):
        if argv[2].startswith("composer_serve_"):
            channel.send(b"composer-solution-ready\n")
            channel.close()
            raise SandboxError("the sandbox is gone")
        return await real(self, argv, channel=channel, **more)

    monkeypatch.setattr(FolderSandbox, "exec", gone)
    with pytest.raises(SandboxError, match="the sandbox is gone"):
        grade(APART, RIGHT)


def test_one_sandbox_that_does_not_start_leaves_no_other(monkeypatch):
    backend, stopped, real = FolderBackend(), [], FolderSandbox.stop
    backend.errors = [SandboxError("no room")]

    async def stop(self):
        stopped.append(self)
        await real(self)

    monkeypatch.setattr(FolderSandbox, "stop", stop)
    with pytest.raises(SandboxError, match="no room"):
        grade(APART, RIGHT, backend=backend)
    assert backend.starts == 2 and len(stopped) == 1


def test_sources_of_tests_are_not_on_the_disk_when_the_solution_runs():
    spy = "from pathlib import Path\nseen = [Path(p).read_text() for p in ('test_hidden.py', 'tests/test_deep.py')]\n"
    source = b"import main\ndef test_a(): assert main.seen == ['', '']\n"
    task = Task("t/train/0", "", {"main.py": b""}, {"test_hidden.py": source, "tests/test_deep.py": source})
    verdict = grade(task, {"main.py": spy.encode()})
    assert verdict.score == 1.0, verdict


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
    async def hang(self, argv, **_):
        await asyncio.Event().wait()

    monkeypatch.setattr(FolderSandbox, "exec", hang)
    monkeypatch.setattr("envs.grading.pytest_grader._AROUND_S", 0.1)
    with pytest.raises(GradingError, match="did not end within 0.2 s"):
        grade(TASK, RIGHT, PytestGrader(timeout_s=0.1))


def test_the_wait_for_a_sandbox_is_no_part_of_a_run(monkeypatch):
    monkeypatch.setattr("envs.grading.pytest_grader._AROUND_S", 10.0)
    grader, backend = PytestGrader(timeout_s=10.0), FolderBackend()

    async def wait():
        backend.gate = asyncio.Event()
        # Longer than the run itself may take: on the loop's own clock, which is set forward.
        loop = asyncio.get_running_loop()
        grading = asyncio.ensure_future(grader.grade(TASK, RIGHT, backend))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(loop, "time", lambda real=loop.time: real() + 600.0)
        await asyncio.sleep(0.1)
        assert not grading.done()
        backend.gate.set()
        return await grading

    assert asyncio.run(wait()).score == 1.0


def test_a_sandbox_without_pytest_is_not_the_agents_fault(monkeypatch):
    async def no_pytest(self, argv, **_):
        return ExecResult(1, b"No module named pytest")

    monkeypatch.setattr(FolderSandbox, "exec", no_pytest)
    with pytest.raises(GradingError, match="exit code 1: No module named pytest.*needs python3 with pytest"):
        grade(TASK, RIGHT)


def test_the_name_of_the_solutions_server_is_new_each_time_and_known_to_the_warm_process(monkeypatch):
    real, names = FolderSandbox.exec, []

    async def exec(self, argv, **more):
        if "pytest" not in argv:
            names.append(argv[2])
            assert serves(argv, {})
        return await real(self, argv, **more)

    monkeypatch.setattr(FolderSandbox, "exec", exec)
    for _ in range(2):
        assert grade(APART, RIGHT).score == 1.0
    assert len(set(names)) == 2, names


def test_reports_are_recognised_by_the_same_words_on_both_sides():
    for name in ("READY", "NONCE"):
        assert f"{name} = {getattr(pytest_grader, name)!r}".replace("'", '"') in pytest_grader.REPORTER.read_text()
    words = f"AWAITED, GREETED = {pytest_grader.AWAITED!r}, {pytest_grader.GREETED!r}".replace("'", '"')
    assert words in pytest_grader.CLIENT.read_text()
    hello = 'HELLO = b"composer-solution-ready\\n"'
    assert hello in pytest_grader.CLIENT.read_text() and hello in pytest_grader.SERVER.read_text()


def test_check_wants_a_passing_reference_and_a_failing_base():
    async def check(task, reference):
        await PytestGrader().check(task, reference, FolderBackend())

    asyncio.run(check(TASK, RIGHT))
    with pytest.raises(TaskError, match=r"micro/train/2 fail on its reference: test_hidden.py::test_case_1: failed"):
        asyncio.run(check(TASK, TASK.files))
    asyncio.run(check(TASK, None))
    for reference in ({}, None):
        with pytest.raises(TaskError, match="task t/train/0 pass on its base state, so there is nothing to do: break"):
            asyncio.run(check(with_tests("def test_a(): pass"), reference))


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
    for _ in range(2):
        hanging = grade(APART, {"main.py": b"def scale_row(a, b):\n    while True: pass"}, slow, backend)
        assert hanging.details["reason"] == "the tests did not end within 0.5 s"
    assert backend.starts == 8


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
