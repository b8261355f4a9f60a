"""What code of the agent's may try against the grading of a micro task, in real sandboxes: no reward for any of it.

The attacks stand in attacks.txt. Several of them work where tests and solution share a process, or a sandbox.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from composer.types import Split
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.realism.load import load_profile
from envs.tasks.micro import MicroTaskset

TASKSET = MicroTaskset()
TASK = TASKSET.task(Split.TRAIN, 2)
RIGHT = TASKSET.reference(TASK)


def read_attacks() -> dict[str, str]:
    """The attacks by name."""
    text = Path(__file__).with_name("attacks.txt").read_text()
    sources = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)", text, re.MULTILINE))
    pieces = {name: source for name, source in sources.items() if name.startswith("<<")}
    for piece, source in pieces.items():
        sources = {name: attack.replace(piece, source) for name, attack in sources.items()}
    return {
        name: source if "def scale_row" in source else f"{source}def scale_row(a, b):\n    return 0\n"
        for name, source in sources.items()
        if name not in pieces
    }


ATTACKS = read_attacks()
SLOW = {"hang at import", "hang in the function", "stop oneself"}


@pytest.fixture(scope="module")
def grade(runner, backend):
    """Grade a `main.py`, with other files beside it; each time anew."""

    def run(main, timeout_s=20.0, **others):
        files = {**TASK.files, "main.py": main.encode(), **others}
        return runner.run(PytestGrader(timeout_s=timeout_s, memoise=False).grade(TASK, files, backend))

    return run


@pytest.mark.parametrize("name", list(ATTACKS))
def test_no_attack_is_rewarded(grade, name):
    verdict = grade(ATTACKS[name], timeout_s=1.0 if name in SLOW else 20.0)
    assert verdict.score == 0.0 and verdict.details["reason"], verdict
    if name in SLOW:
        assert verdict.details["reason"] == "the tests did not end within 1 s"


def test_the_honest_solution_is_rewarded_after_all_that(grade):
    verdict = grade(RIGHT["main.py"].decode())
    assert (verdict.score, verdict.details["num_passed"]) == (1.0, 3)


BESIDE = {
    "conftest.py": "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport():\n"
    "    report = yield\n    report.outcome = 'passed'\n    return report\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "usercustomize.py": "import os\nos._exit(0)\n",
    "evil.pth": "import os; os._exit(0)\n",
    "json.py": "import os\nos._exit(0)\n",
    "pytest.py": "print('composer-grading-ready')\n",
    "composer_solution.py": "def call(*args): raise SystemExit\n",
    "composer_serve.py": "raise SystemExit\n",
    "composer_serve.py/x": "",
    "composer_serve/__init__.py": "",
    "composer_serve.cpython-311-x86_64-linux-gnu.so": "no library",
    "test_hidden.py": "def test_case_1(): pass\ndef test_case_2(): pass\ndef test_case_3(): pass\n",
    "test_hidden/__init__.py": "def test_case_1(): pass\n",
}


@pytest.mark.parametrize("path", list(BESIDE))
def test_no_file_beside_the_solution_changes_a_verdict(grade, path):
    others = {path: BESIDE[path].encode()}
    assert grade(TASK.files["main.py"].decode(), **others).score == 0.0
    assert grade(RIGHT["main.py"].decode(), **others).score == 1.0


SPAWNS = """
import multiprocessing
def multiply(pair): return pair[0] * pair[1]
def scale_row(a, b):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(multiply, [(a, b)])[0]
"""


def test_an_honest_solution_may_spawn_processes(grade):
    verdict = grade(SPAWNS)
    assert verdict.score == 1.0, verdict


SPY = """
import gc, os, sys, types
def scale_row(a, b):
    crowd = CROWD
    files = [(folder, name) for folder, _, names in os.walk("/") for name in names]
    fds = os.listdir("/proc/self/fd")[:-1]  # the last is of the list itself
    found = {
        "files": [f for f in files if "hidden" in f[1] and not f[0].startswith(("/proc", "/usr"))],
        "modules": [n for n in sys.modules if n.startswith(("test_", "composer", "envs"))],
        "functions": [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == "check"],
        "processes": sorted({open(f"/proc/{p}/comm").read()[:-1] for p in os.listdir("/proc") if p.isdigit()} - crowd),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in fds),
        "here": sorted(os.listdir()),
        "variables": [n for n in os.environ if n.startswith(("COMPOSER", "PYTEST"))],
    }
    raise Exception(found)
"""


def test_there_is_nothing_to_find_beside_the_solution(grade):
    crowd = {name[:15] for name in load_profile("developer").processes}  # what a kernel keeps of a name
    verdict = grade(SPY.replace("CROWD", repr(crowd)))
    found = verdict.details["reason"].partition("Exception: ")[2].rpartition(" (line")[0]
    assert found.replace("'", '"') == (
        '{"files": [], "modules": [], "functions": [], "processes": ["python3.11", "systemd"], '
        '"descriptors": ["/dev/null", "/dev/null", "/dev/null", "/dev/null", "socket", "socket"], '
        '"here": ["README.md", "main.py", "test_main.py"], "variables": []}'
    )


def test_no_sandbox_is_left_over(backend):
    assert not backend._sandboxes
