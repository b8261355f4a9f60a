"""The grader in real sandboxes, with tests that run in the solution's process (test_attacks.py has the others)."""

from __future__ import annotations

import dataclasses

import pytest

from composer.errors import TaskError
from composer.types import Split, Task
from envs.grading.pytest_grader import PytestGrader
from envs.tasks.micro import MicroTaskset

TASKSET = MicroTaskset()
MICRO = TASKSET.task(Split.TRAIN, 2)
RIGHT = TASKSET.reference(MICRO)
TESTS = b"""builtin_type = type  # before main.py could put another one in its place

from main import scale_row


def check(result, expected):
    assert builtin_type(result) is int
    assert result == expected


def test_case_1():
    check(scale_row(7, 3), 21)


def test_case_2():
    check(scale_row(9, 4), 36)


def test_case_3():
    check(scale_row(-7, 5), -35)
"""
TASK = dataclasses.replace(MICRO, hidden_tests={"test_hidden.py": TESTS})


@pytest.fixture(scope="module")
def grade(runner, backend):
    """Grade final files of a task; each state once."""
    grader = PytestGrader()

    def run(task, files, grader=grader):
        return runner.run(grader.grade(task, files, backend))

    return run


def with_tests(source: str, main: str = "x = 1\n") -> Task:
    return Task("t/train/0", "", {"main.py": main.encode()}, {"test_hidden.py": source.encode()})


@pytest.mark.parametrize(
    ("source", "score", "reason"),
    [
        ("import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(n): assert n", 1.0, ""),
        ("import pytest\n@pytest.mark.parametrize('n', [1, 0])\ndef test_a(n): assert n", 0.0, "test_a[0]: failed"),
        ("import pytest\n@pytest.mark.parametrize('n', [])\ndef test_a(n): assert n", 0.0, "skipped"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", 0.0, "skipped"),
        ("import pytest\n@pytest.mark.xfail\ndef test_a(): assert 0", 0.0, "skipped"),
        ("import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert 0\ndef test_a(f): pass", 0.0, "in teardown"),
        ("import pytest\n@pytest.fixture\ndef f(): assert 0\ndef test_a(f): pass", 0.0, "failed in setup"),
        ("import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)", 1.0, ""),
        (
            "def test_a(tmp_path, monkeypatch, capsys):\n    print('x')\n    assert capsys.readouterr().out == 'x\\n'",
            1.0,
            "",
        ),
        ("import main\ndef test_a(): assert main.y", 0.0, "AttributeError"),
        ("import nowhere\ndef test_a(): pass", 0.0, "in collect"),
        ("import sys\ndef test_a(): assert sys.stdin.read() == ''", 1.0, ""),
        ("if 0:\n    def test_a(): pass\ndef test_b(): pass", 1.0, ""),
        ("def test_a(): pass\ndel test_a\ndef test_b(): pass", 0.0, "1 of the tests did not run"),
    ],
)
def test_outcomes(grade, source, score, reason):
    verdict = grade(with_tests(source), {"main.py": b"x = 1\n"})
    assert verdict.score == score, verdict
    assert reason in verdict.details["reason"]


# What an agent may write to pass without solving; each in main.py, which the tests import.
CHEATS = {
    "exit at import": "import os\nos._exit(0)\n",
    "exit politely": "import sys\nsys.exit(0)\n",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\n",
    "exit in the function": "import os\ndef scale_row(a, b):\n    os._exit(0)\n",
    "pytest.exit": "import pytest\npytest.exit('fine', 0)\n",
    "skip everything": "import pytest\npytest.skip(allow_module_level=True)\n",
    "equal to everything": "class E:\n    __eq__ = lambda s, o: True\ndef scale_row(a, b):\n    return E()\n",
    "a number equal to everything": "class E(int):\n    __eq__ = lambda s, o: True\n"
    "def scale_row(a, b):\n    return E()\n",
    "another type": "import builtins\nclass E(int):\n    __eq__ = lambda s, o: True\n"
    "builtins.type = lambda o: int\nbuiltins.int = E\ndef scale_row(a, b):\n    return E()\n",
    "print a verdict": "import json, os\nfor fd in range(9):\n    for case in '123':\n        try:\n"
    "            event = dict(when='call', outcome='passed', id='test_hidden.py::test_case_' + case)\n"
    "            os.write(fd, json.dumps(event).encode() + b'\\n')\n"
    "        except OSError: pass\ndef scale_row(a, b):\n    return 0\n",
    "kill the supervisor": "import os\nos.kill(os.getppid(), 9)\n",
    "read the nonce": "import sys, os\nos.write(1, b'\\n' + sys.stdin.buffer.read() + b'[]\\n')\nos._exit(0)\n",
    "kill everything": "import os\nfor pid in range(1, 200):\n    try: os.kill(pid, 9)\n    except OSError: pass\n",
    "crash": "import os\nos.kill(os.getpid(), 11)\n",
    "fill the memory": "x = []\nwhile True: x.append(bytearray(10**7))\n",
    "leave a process behind": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n",
    "remove the tests": "import shutil\nshutil.rmtree('/home/dev/project', ignore_errors=True)\n",
    "close everything": "import os\nos.closerange(0, 99)\n",
    "read the tests": "import re\ndef scale_row(a, b):\n"
    "    return int(re.search(r'\\(%d, %d\\), (-?\\d+)\\)' % (a, b), open('test_hidden.py').read())[1])\n",
    "read the supervisor's nonce and report in its name": "import json, os\nparent = os.getppid()\n"
    "nonce = os.read(os.open(f'/proc/{parent}/fd/0', os.O_RDONLY), 32)\n"
    "ids = [f'test_hidden.py::test_case_{n}' for n in (1, 2, 3)]\n"
    "events = [dict(id=i, when='call', outcome='passed', message='') for i in ids] + [dict(when='end')]\n"
    "os.write(os.open(f'/proc/{parent}/fd/1', os.O_WRONLY), b'\\n' + nonce + json.dumps(events).encode() + b'\\n')\n"
    "os.kill(parent, 9)\n",
    "look into the supervisor's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb+').read(1)\n"
    "def scale_row(a, b):\n    return a * b\n",
}


@pytest.mark.parametrize("name", list(CHEATS))
def test_cheats_in_the_module_get_nothing(grade, name):
    verdict = grade(TASK, {**TASK.files, "main.py": CHEATS[name].encode()})
    assert verdict.score == 0.0 and verdict.details["reason"]


PATCH = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
PATCH += "    result = yield\n    result.get_result().outcome = 'passed'\n"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("conftest.py", PATCH),
        ("pytest.ini", "[pytest]\naddopts = --deselect test_hidden.py\npython_functions = none_*\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"),
        ("test_hidden.py", "def test_case_1(): pass\ndef test_case_2(): pass\ndef test_case_3(): pass\n"),
        ("test_hidden/__init__.py", "def test_case_1(): pass\n"),
        ("pytest.py", "print('composer-grading-ready')\n"),
        ("sitecustomize.py", "import os\nos._exit(0)\n"),
    ],
)
def test_cheats_beside_the_module_change_nothing(grade, path, content):
    grader = PytestGrader(memoise=False)
    assert grade(TASK, {**TASK.files, path: content.encode()}, grader).score == 0.0
    assert grade(TASK, {**RIGHT, path: content.encode()}, grader).score == 1.0


def test_tests_that_do_not_end_have_failed(grade):
    verdict = grade(TASK, {"main.py": b"while True: pass\n"}, PytestGrader(timeout_s=1.0))
    assert verdict.score == 0.0 and verdict.details["reason"] == "the tests did not end within 1 s"


def test_all_that_was_collected_has_to_pass(grade):
    source = "import main, pytest\n@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_a(n): assert main.f(n) == 1"
    leave_out = (
        "import gc\ndef f(n):\n    [session] = [o for o in gc.get_objects() if type(o).__name__ == 'Session']\n"
        "    del session.items[1:]\n    return 1\n"
    )
    verdict = grade(with_tests(source), {"main.py": leave_out.encode()})
    assert verdict.score == 0.0 and verdict.details["reason"].startswith("2 of the tests did not run, test_hidden.py::")


def test_the_solution_sees_empty_test_files_and_the_tests_run(grade):
    spy = "from pathlib import Path\nassert Path('test_hidden.py').read_text() == ''\n" + RIGHT["main.py"].decode()
    assert grade(TASK, {**RIGHT, "main.py": spy.encode()}).score == 1.0


def test_every_micro_task_can_be_graded(runner, backend):
    for split in Split:
        task = TASKSET.task(split, 3)
        runner.run(PytestGrader().check(task, TASKSET.reference(task), backend))
    with pytest.raises(TaskError, match="fail on its reference"):
        runner.run(PytestGrader().check(MICRO, MICRO.files, backend))


def test_the_grading_sandbox_is_stopped_whatever_happens(grade, backend):
    grade(TASK, {"main.py": b"while True: pass\n"}, PytestGrader(timeout_s=0.5))
    assert not backend._sandboxes


@pytest.mark.parametrize("name", ["pytest.toml", ".pytest.toml"])
def test_configuration_left_behind_forges_nothing(grade, name):
    config = {name: b'[pytest]\naddopts = ["-p", "evil"]\n', "evil.py": b"import os\nos._exit(0)\n"}
    assert "test_case_1: failed in call" in grade(TASK, {**TASK.files, **config}).details["reason"]
