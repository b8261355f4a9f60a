"""What the supervisor of a command's pytest believes, and what real pytests end with under it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envs.grading.reporter import judge

sys.path.insert(0, str(Path(__file__).parent))
from supervised_pytest import run  # noqa: E402


def event(name: str, outcome: str = "passed", when: str = "call", where: str = "", **more):
    seen = {"message": "", "expected": False, "of_tests": True, "is_raised": True}
    return {"id": name, "outcome": outcome, "when": when, "where": where, **seen, **more}


def events(*seen, ids=("t.py::a", "t.py::b"), status=0, is_whole=True):
    end = [{"when": "status", "status": status}, {"when": "end"}] if is_whole else []
    return [{"when": "collected", "ids": list(ids)}, *seen, *end]


A, B = event("t.py::a"), event("t.py::b")


@pytest.mark.parametrize(
    ("seen", "found", "problem", "status"),
    [
        (events(A, B), {"t.py::a": True, "t.py::b": True}, "", 0),
        (events(A, event("t.py::b", "failed"), status=1), {"t.py::a": True, "t.py::b": False}, "", 1),
        (events(A, event("t.py::b", "failed")), {"t.py::a": True, "t.py::b": False}, "tests failed, and pytest ", 1),
        (events(A, B, event("t.py::b", "failed", "teardown"), status=1), {"t.py::a": True, "t.py::b": False}, "", 1),
        (events(A), {"t.py::a": True}, "1 of the tests did not run, t.py::b among them", 1),
        (events(A, B, is_whole=False), {"t.py::a": True, "t.py::b": True}, "pytest's process ended before", 1),
        ([], {}, "pytest's process ended before its tests did", 1),
        (events(ids=(), status=5), {}, "", 5),
        (events(A, event("t.py::b", "skipped", "setup", "/w/t.py")), {"t.py::a": True}, "", 0),
        (events(A, event("t.py::b", "skipped", "call", "/w/tests/helper.py")), {"t.py::a": True}, "", 0),
        (
            events(A, event("t.py::b", "skipped", "call", "/w/main.py", of_tests=False)),
            {"t.py::a": True, "t.py::b": False},
            "t.py::b was skipped by what it tests, /w/main.py",
            1,
        ),
        (
            events(A, event("t.py::b", "skipped", where="/w/main.py", expected=True, is_raised=False)),
            {"t.py::a": True, "t.py::b": True},
            "",
            0,
        ),
        (events(A, event("t.py::b", "skipped", where="/w/t.py", expected=True)), {"t.py::a": True}, "", 0),
        (
            events(A, event("t.py::b", "passed", where="/w/t.py", expected=True, is_raised=False, of_tests=False)),
            {"t.py::a": True, "t.py::b": False},
            "t.py::b was skipped by what it tests",
            1,
        ),
        (
            events(A, event("t.py::b", "skipped", where="/w/main.py", expected=True, of_tests=False)),
            {"t.py::a": True, "t.py::b": False},
            "t.py::b was skipped by what it tests",
            1,
        ),
    ],
)
def test_what_is_believed(seen, found, problem, status):
    report = judge(seen)
    assert report["found"] == found and report["status"] == status
    assert report["problem"].startswith(problem) and bool(report["problem"]) == bool(problem)


IMPORTS = "import main\n\n\ndef test_a():\n    assert main.f() == 1\n\n\ndef test_b():\n    pass\n"


def test_a_right_solution_passes_and_pytest_says_what_it_always_says(tmp_path):
    code, report, output = run(tmp_path, "def f(): return 1\n", IMPORTS)
    assert code == 0 and report["found"] == {"test_it.py::test_a": True, "test_it.py::test_b": True}
    assert "PASSED test_it.py::test_a" in output and "2 passed" in output


def test_a_wrong_solution_fails_with_its_reason(tmp_path):
    code, report, output = run(tmp_path, "def f(): return 2\n", IMPORTS)
    assert code == 1 and report["found"] == {"test_it.py::test_a": False, "test_it.py::test_b": True}
    assert report["reasons"][0].startswith("test_it.py::test_a: failed in call: assert 2 == 1")
    assert "assert 2 == 1" in output


@pytest.mark.parametrize(
    "main",
    [
        "import os\nos._exit(0)\n",
        "import os\ndef f(): os._exit(0)\n",
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(): return 2\n",
        "import pytest\ndef f(): pytest.exit('x', 0)\n",
        "import pytest\ndef f(): pytest.skip('x')\n",
        "import pytest\ndef f(): pytest.xfail('x')\n",
        "import os\ndef f(): os.execvp('true', ['true'])\n",
        "import os\ndef f(): os.kill(os.getppid(), 9)\n",
        "import sys\nopen('/proc/self/fd/0').read()\ndef f(): return 2\n",
    ],
)
def test_nothing_that_the_solution_does_ends_with_success(tmp_path, main):
    code, report, _ = run(tmp_path, main, IMPORTS)
    assert code != 0
    assert report is None or not report["found"].get("test_it.py::test_a", False)


def test_marks_and_skips_of_the_tests_own_are_theirs(tmp_path):
    test = (
        "import main, pytest\n\n\n@pytest.mark.xfail\ndef test_a():\n    main.f()\n"
        "\n\ndef test_b():\n    pytest.skip('x')\n"
        "\n\n@pytest.mark.skip\ndef test_c(): pass\n\n\n@pytest.mark.xfail(run=False)\ndef test_d(): pass\n"
    )
    code, report, output = run(tmp_path, "def f(): raise ValueError\n", test)
    assert code == 0, output
    assert report["found"] == {"test_it.py::test_a": True, "test_it.py::test_d": True}


def test_options_that_run_no_test_are_left_alone(tmp_path):
    code, report, output = run(tmp_path, "def f(): return 1\n", IMPORTS, "--collect-only")
    assert code == 0 and report is None and "2 tests collected" in output


def test_without_a_nonce_there_is_an_exit_code_and_no_report(tmp_path):
    code, report, _ = run(tmp_path, "import os\nos._exit(0)\n", IMPORTS, nonce=b"")
    assert code == 1 and report is None


def test_what_the_tests_start_has_no_supervisor(tmp_path):
    test = (
        "import os, subprocess, sys\n\n\ndef test_a():\n    code = [sys.executable, '-m', 'pytest', '-q', 'inner.py']\n"
        "    open('inner.py', 'w').write('def test_x(): pass')\n"
        "    done = subprocess.run(code, capture_output=True, text=True)\n"
        "    assert done.returncode == 0 and 'composer' not in done.stderr and '1 passed' in done.stdout\n"
    )
    code, report, output = run(tmp_path, "", test)
    assert code == 0 and report["found"] == {"test_it.py::test_a": True}, output
