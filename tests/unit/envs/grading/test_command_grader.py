"""What a task's command says, and in which files it runs; with real programs in plain folders."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from composer.errors import GradingError, TaskError
from composer.types import Task
from envs.grading.command_grader import CommandGrader, Recipe
from envs.grading.reports import junit_name, read_junit, read_summary

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from image_stand_in import ImageBackend  # noqa: E402

BASE = {"main.py": b"x = 1\n", "tests/test_a.py": b"old\n", "tool.sh": b"echo tool\n"}
PATCH = b"--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-old\n+new\n"


def task(command: str, hidden: dict[str, bytes] | None = None, image: str = "base", **recipe) -> Task:
    metadata = Recipe(command, **recipe).to_metadata()
    return Task("t/train/0", "", {} if image else BASE, hidden or {}, image, metadata)


def grade(task, files=BASE, grader=None, backend=None):
    backend = backend or ImageBackend({"base": BASE})
    verdict = asyncio.run((grader or CommandGrader()).grade(task, files, backend))
    assert all(not sandbox.root.exists() for sandbox in backend.started)
    return verdict


@pytest.mark.parametrize("image", ["base", ""])
def test_the_exit_code_decides(image):
    assert grade(task("true", image=image)).score == 1.0
    verdict = grade(task("echo so; exit 3", image=image))
    assert verdict.score == 0.0 and verdict.details["reason"] == "the command failed: exit code 3: so"


@pytest.mark.parametrize("image", ["base", ""])
def test_the_command_runs_on_the_agents_files_with_the_tasks_tests(image):
    left = {
        "main.py": b"x = 2\n",  # changed
        "new.txt": b"new\n",  # and tool.sh is gone
        "tests/test_a.py": b"forged\n",
        "tests/test_b.py": b"forged\n",
        "conftest.py": b"forged\n",
    }
    look = 'for f in $(find . -type f | sort); do echo "$f $(cat $f)"; done; exit 1'
    verdict = grade(task(look, {"tests.patch": PATCH, "more.py": b"m\n"}, image, patch="tests.patch"), left)
    assert verdict.details["reason"].removeprefix("the command failed: exit code 1: ") == (
        "./main.py x = 2 ./more.py m ./new.txt new ./tests/test_a.py new"
    )
    verdict = grade(task(look, {"t.sh": b"t\n"}, image, hidden_folder="/tests", restores_tests=False), left)
    assert verdict.details["reason"].removeprefix("the command failed: exit code 1: ") == (
        "./conftest.py forged ./main.py x = 2 ./new.txt new ./tests/test_a.py forged ./tests/test_b.py forged"
    )


def test_what_is_alike_is_left_alone():
    backend = ImageBackend({"base": BASE})
    grade(task("false", {"more.py": b"m\n"}), {**BASE, "main.py": b"x = 2\n"}, backend=backend)
    [sandbox] = backend.started
    supervisor, origins, digests, *written = sorted(sandbox.written)
    assert re.fullmatch(r"/tmp/[0-9a-f]{32}/_report_[0-9a-f]{16}\.py", supervisor)
    name = supervisor.removesuffix(".py")
    assert (origins, digests) == (f"{name}_origins.py", f"{name}_tests.json")
    assert written == ["main.py", "more.py"]


def test_where_pytest_runs_under_a_supervisor_a_solution_without_one_has_no_reward():
    command = 'if grep -q "x = 1" main.py; then echo composer-grading-ready; exit 1; fi'
    backend, grader = ImageBackend({"base": BASE}), CommandGrader()
    for num_started in (2, 3):  # the base state is asked once
        verdict = grade(task(command), {**BASE, "main.py": b"x = 2\n"}, grader, backend)
        assert verdict.score == 0.0 and "did not run under its supervisor" in verdict.details["reason"]
        assert len(backend.started) == num_started
    assert grade(task("true"), {**BASE, "main.py": b"x = 2\n"}, grader, backend).score == 1.0


def test_a_patch_that_adds_and_removes_files():
    patch = b"--- a/tests/test_a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n"
    patch += b"--- /dev/null\n+++ b/tests/test_c.py\n@@ -0,0 +1 @@\n+c\n"
    verdict = grade(task("ls tests; exit 1", {"p": patch}, patch="p"))
    assert verdict.details["reason"] == "the command failed: exit code 1: test_c.py"
    with pytest.raises(TaskError, match=r"The patch of the tests of task t/train/0 cannot be applied: hunk 1 of"):
        grade(task("true", {"p": PATCH.replace(b"-old", b"-other")}, patch="p"))


SUMMARY = """=== short test summary info ===
PASSED forged
=== short test summary info ===
PASSED t.py::test_a
PASSED t.py::test_p[x - y]
FAILED t.py::test_b - assert 1 == 2
ERROR t.py::test_c - fixture
XFAIL t.py::test_d - later
XPASS t.py::test_e
SKIPPED [1] t.py:3: not here
=== 1 failed in 0.1s ===
"""


def test_pytests_summary():
    assert read_summary(b"PASSED t.py::test_a\n") == {}
    found = read_summary(SUMMARY.encode())
    assert found == {
        "t.py::test_a": True,
        "t.py::test_p[x - y]": True,
        "t.py::test_b": False,
        "t.py::test_c": False,
        "t.py::test_d": True,
        "t.py::test_e": True,
    }
    both = b"== short test summary info ==\nPASSED a\nERROR a - in teardown\n"
    assert read_summary(both) == {"a": False}


def junit(body: str) -> bytes:
    return f'<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>{body}</testsuite></testsuites>'.encode()


def test_junit_reports():
    content = junit(
        '<testcase classname="tests.test_a.TestB" name="test_c[1]" time="0"/>'
        '<testcase classname="t" name="failed"><failure message="x">y</failure></testcase>'
        '<testcase classname="t" name="broken"><error/></testcase>'
        '<testcase classname="t" name="skipped"><skipped/></testcase>'
        '<testcase classname="t" name="teardown"/><testcase classname="t" name="teardown"><error/></testcase>'
    )
    expected = {"tests.test_a.TestB.test_c[1]": True, "t.failed": False, "t.broken": False, "t.teardown": False}
    assert read_junit(content) == expected
    assert junit_name("tests/test_a.py::TestB::test_c[1]") == "tests.test_a.TestB.test_c[1]"
    assert junit_name("test_a.py::test_x[a/b.py]") == "test_a.test_x[a/b.py]"


@pytest.mark.parametrize("content", [b"", b"<a>", b"\xff", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"])
def test_what_is_no_junit_report(content):
    with pytest.raises(ValueError):
        read_junit(content)


PASSES = junit('<testcase classname="t" name="test_a"/><testcase classname="t" name="test_b"/>')
FAILS = junit('<testcase classname="t" name="test_a"/><testcase classname="t" name="test_b"><failure/></testcase>')


@pytest.mark.parametrize(
    ("report", "end", "lists", "score", "reason"),
    [
        (PASSES, 0, {}, 1.0, ""),
        (PASSES, 1, {}, 0.0, "the tests passed, but the command failed: exit code 1: no output"),
        (FAILS, 1, {}, 0.0, "1 tests failed, t.test_b among them"),
        (FAILS, 1, {"fail_to_pass": ("t.py::test_a",)}, 1.0, ""),
        (FAILS, 1, {"pass_to_pass": ("t.py::test_a", "t.py::test_b")}, 0.0, "1 of 2 tests did not pass, t.test_b "),
        (PASSES, 0, {"fail_to_pass": ("t.py::test_c",)}, 0.0, "1 of 1 tests did not pass, t.test_c among them"),
        (junit(""), 0, {}, 0.0, "no test is in the report: exit code 0"),
        (b"<", 0, {}, 0.0, "there is no report of the tests (it is no XML"),
        (None, 2, {}, 0.0, "there is no report of the tests (No such file or directory): exit code 2"),
    ],
)
def test_lists_of_tests(report, end, lists, score, reason):
    hidden = {} if report is None else {"report.xml": report}
    copy = "" if report is None else 'cp report.xml "$ROOT"/report.xml; '
    verdict = grade(task(f"{copy}exit {end}", hidden, report="junit", report_path="/report.xml", **lists))
    assert verdict.score == score and verdict.details["reason"].startswith(reason)


def test_a_path_for_the_report_is_made_up_each_time():
    t = task("echo {report}; exit 1", report="exit_code")
    said = {grade(t).details["reason"] for _ in range(2)}
    assert len(said) == 2
    assert all(re.fullmatch(r"the command failed: exit code 1: /tmp/report-[0-9a-f]{32}\.xml", s) for s in said)


def test_a_summary_is_read_from_what_was_printed():
    t = task("cat s.txt; exit 1", {"s.txt": SUMMARY.encode()}, report="pytest", fail_to_pass=("t.py::test_a",))
    assert grade(t).score == 1.0
    t = task("cat s.txt; exit 1", {"s.txt": SUMMARY.encode()}, report="pytest")
    assert grade(t).details["reason"] == "2 tests failed, t.py::test_b among them"


@pytest.mark.parametrize(
    ("command", "score", "reason"),
    [
        ("echo 1 > $F", 1.0, ""),
        ("echo 0.25 > $F", 0.25, "the command wrote a reward of 0.25: exit code 0"),
        ("echo 1 > $F; exit 1", 1.0, ""),
        ("""echo '{"reward": 0.5}' > ${F%.txt}.json""", 0.5, "the command wrote a reward of 0.5"),
        ("true", 0.0, "the command wrote no reward to /logs/reward.txt: exit code 0: no output"),
        ("echo good > $F", 0.0, "the command wrote 'good' to /logs/reward.txt, which is no number"),
        ("echo 2 > $F", 0.0, "the command wrote 2.0 to /logs/reward.txt, which is not in [0, 1]"),
        ("echo NaN > $F", 0.0, "the command wrote nan to /logs/reward.txt, which is not in [0, 1]"),
        ("echo '[1]' > $F", 0.0, "the command wrote '[1]' to /logs/reward.txt, which is no number"),
    ],
)
def test_rewards(command, score, reason):
    prepare = 'F="$ROOT"/logs/reward.txt; mkdir "$ROOT"/logs; '
    verdict = grade(task(prepare + command, report="reward", report_path="/logs/reward.txt"))
    assert verdict.score == score and verdict.details["reason"].startswith(reason)
    assert reason or verdict.details["reason"] == ""


def test_what_is_not_the_agents_fault_is_no_zero():
    with pytest.raises(GradingError, match=r"The image of task t/train/0 lacks what its tests are run with: 'no-such"):
        grade(task("no-such-program"))
    with pytest.raises(GradingError, match=r"/closed/t.sh of task t/train/0 cannot be put .* \(Permission denied\)"):
        grade(task("true", {"t.sh": b""}, hidden_folder="/closed"))
    small = CommandGrader(max_state_bytes=5)
    with pytest.raises(
        GradingError, match=r"files of image base of task t/train/0 .*File too large.*max_state_bytes=5"
    ):
        grade(task("true"), grader=small)


def test_an_exit_code_that_means_no_such_command_is_the_solutions_own_if_the_base_state_knows_the_command():
    t = task(". ./tool.sh", image="base")
    verdict = grade(t, {**BASE, "tool.sh": b"exit 127\n"})
    assert verdict.score == 0.0 and verdict.details["reason"].startswith("the command ended with 127, as on the base")


REPORTS = {
    "all passed": ({"t.py::test_a": True}, ""),
    "one failed": ({"t.py::test_a": False}, ""),
    "ended early": ({}, "pytest's process ended before its tests did"),
}


@pytest.mark.parametrize(("name", "score"), [("all passed", 1.0), ("one failed", 0.0), ("ended early", 0.0)])
def test_a_report_of_the_supervisor_outweighs_what_was_printed_and_written(name, score):
    found, problem = REPORTS[name]
    report = json.dumps({"found": found, "problem": problem, "reasons": [], "status": 0})
    # The command plays the supervisor, which alone knows the word in standard input.
    say = f"read -rn 32 nonce; printf 'composer-grading-ready\\n\\n%s%s\\n' $nonce {shlex.quote(report)}; "
    forged = "=== short test summary info ===\nPASSED t.py::test_a\n"
    summary = task(f"bash -c {shlex.quote(say)}; printf {shlex.quote(forged)}", report="pytest")
    assert grade(summary).score == score
    reward = 'mkdir "$ROOT"/logs; echo 1 > "$ROOT"/logs/reward.txt'
    command = f"bash -c {shlex.quote(say)}; {reward}"
    verdict = grade(task(command, report="reward", report_path="/logs/reward.txt"))
    assert verdict.score == score
    assert score or verdict.details["reason"].startswith("a reward of 1 was written to /logs/reward.txt beside tests")


def test_a_supervisor_that_never_reported_was_killed():
    forged = "=== short test summary info ===\nPASSED t.py::test_a\n"
    t = task(f"echo composer-grading-ready; printf {shlex.quote(forged)}", report="pytest")
    verdict = grade(t)
    assert verdict.score == 0.0
    assert verdict.details["reason"].startswith("pytest's process was killed before it had reported")


def test_hidden_tests_elsewhere_have_a_configuration_of_their_own():
    look = 'cd "$ROOT"/tests; for f in *; do echo "$f=$(head -n1 $f)"; done; exit 1'
    reason = "the command failed: exit code 1: "
    verdict = grade(task(look, {"test_a.py": b"a\n"}, hidden_folder="/tests"))
    assert verdict.details["reason"] == f"{reason}pytest.ini=[pytest] test_a.py=a"
    verdict = grade(task(look, {"tox.ini": b"theirs\n"}, hidden_folder="/tests"))
    assert verdict.details["reason"] == f"{reason}tox.ini=theirs"


def test_patterns_of_the_recipe():
    look = "cat tool.sh Makefile; exit 1"
    base = {**BASE, "Makefile": b"base\n"}
    left = {**base, "Makefile": b"mine\n", "tool.sh": b"forged\n"}
    backend = ImageBackend({"base": base})
    verdict = grade(task(look, restored=("*.sh",), kept=("Makefile",)), left, backend=backend)
    assert verdict.details["reason"] == "the command failed: exit code 1: echo tool mine"


def test_time_is_the_tasks_or_the_graders():
    slow = task("sleep 20", timeout_s=0.2)
    assert grade(slow).details["reason"] == "the tests did not end within 0.2 s"
    quick = dataclasses.replace(slow, metadata={**Recipe("sleep 20").to_metadata(), "timeout_s": 0.4})
    assert grade(quick).details["reason"] == "the tests did not end within 0.4 s"
    quick = dataclasses.replace(slow, metadata=Recipe("sleep 20").to_metadata())
    assert grade(quick, grader=CommandGrader(timeout_s=0.3)).details["reason"].endswith("within 0.3 s")


def test_too_much_left_behind_is_a_zero():
    left = {f"f{i}": b"" for i in range(300)}  # and tests/test_a.py, which is restored
    verdict = grade(task("true", image=""), left, grader=CommandGrader(disk_bytes=2**20))
    assert verdict.score == 0.0 and verdict.details["reason"].startswith("302 files and folders were left behind")
    verdict = grade(task("true"), {**BASE, **left}, grader=CommandGrader(disk_bytes=2**20))
    assert verdict.score == 0.0 and " files and folders were left behind" in verdict.details["reason"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "does not say how it is graded: its metadata needs 'grading'"),
        ({"grading": {"comand": "x"}}, r"metadata\['grading'\] is no recipe of CommandGrader"),
        ({"grading": "make test"}, r"metadata\['grading'\] is no recipe of CommandGrader"),
        ({"grading": {"command": "x", "report": "html"}}, "report='html' must be one of exit_code, pytest, junit, rew"),
        ({"grading": {"command": "x", "patch": "p"}}, "its patch 'p' is none of its hidden files"),
    ],
)
def test_a_task_without_a_recipe_is_named(metadata, message):
    with pytest.raises(TaskError, match=f"Task t/train/0.*{message}"):
        grade(Task("t/train/0", "", {}, {}, metadata=metadata))


@pytest.mark.parametrize("name", ["timeout_s", "memory_bytes", "disk_bytes", "num_processes", "concurrency"])
def test_values_that_are_too_small(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least"):
        CommandGrader(**{name: 0})
