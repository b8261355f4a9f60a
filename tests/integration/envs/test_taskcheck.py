"""The check of a taskset with real sandboxes and the real grader."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from composer.rollout.episode import Rubric
from composer.rollout.taskcheck import CheckSettings, Verdict, check_taskset, check_to_dict, render_check
from composer.types import Split, Task
from envs.grading.command_grader import CommandGrader
from envs.grading.pytest_grader import PytestGrader
from envs.tasks.bug_injection import BugInjectionTaskset
from envs.tasks.folder import FolderTaskset
from envs.tasks.harbor import HarborTaskset
from envs.tasks.micro import MicroTaskset
from envs.tasks.swe_jsonl import SweJsonlTaskset

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "envs" / "tasks"))
from small_repository import write_repository  # noqa: E402


@pytest.fixture(scope="module")
def check(runner, backend):
    def run(taskset, grader=None, **settings):
        rubric = Rubric({"hidden_tests": grader or PytestGrader()})
        return runner.run(check_taskset(taskset, rubric, backend, CheckSettings(**settings)))

    return run


def test_micro_is_ok_and_no_verdict_is_remembered(check, runner, backend):
    grader = PytestGrader()
    for split in Split:
        runner.run(grader.grade(MicroTaskset().task(split, 0), {}, backend))
    done = check(MicroTaskset(), grader, num_tasks=1, rounds=3)
    assert done.ok and [t.id for t in done.tasks] == ["micro/train/0", "micro/evaluation/0"]
    for task in done.tasks:
        assert task.untouched == [0.0] * 3 and task.reference == [1.0] * 3
        assert task.seconds > 0.1  # a memory answers at once
    assert grader.memoise and grader.num_runs == 2


def test_every_kind_of_trouble(check, tmp_path):
    hidden = "from composer_solution import call\n\n\ndef test_a():\n    assert call('main.f') == 1\n"
    # What flickers looks at a clock whose odd and even seconds come both up in five rounds; here, at the dice.
    flaky = "import os\nfrom main import f\n\n\ndef test_a():\n    assert f() == 1 and os.urandom(1)[0] < 128\n"
    right, wrong = "def f():\n    return 1\n", "def f():\n    return 2\n"
    for name, (base, solution, test) in {
        "ok": (wrong, right, hidden),
        "trivial": (right, right, hidden),
        "broken reference": (wrong, wrong, hidden),
        "flaky": (wrong, right, flaky),
        "cannot run": (wrong, right, "def helper(): pass\n"),
    }.items():
        for path, content in {
            "request.md": "mend f",
            "files/main.py": base,
            "solution/main.py": solution,
            "tests/test_hidden.py": test,
            "task.yaml": "split: train\n",
        }.items():
            place = tmp_path / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
    # All 12 coins alike: once in 2048 times.
    done = check(FolderTaskset(str(tmp_path)), num_tasks=9, rounds=12)
    by_name = {t.id.removeprefix("folder/train/"): t for t in done.tasks if t.split is Split.TRAIN}
    assert {name: str(t.verdict) for name, t in by_name.items()} == {name: name for name in by_name}
    assert len(by_name) == 5 and not done.ok
    assert "hold no test function" in by_name["cannot run"].reason
    # Tests that import the solution are judged in its process, and the report says so.
    [doubt] = by_name["flaky"].doubts
    assert "import the solution" in doubt and not any(by_name[name].doubts for name in ("ok", "trivial"))
    assert f"beware: 2 of {len(done.tasks)} tasks: {doubt}" in render_check(done)


class Unmutated(BugInjectionTaskset):
    """With one fault that no test can see."""

    def _make(self, key: str, split: Split) -> Task:
        task = super()._make(key, split)
        if key.endswith("total::return-0"):
            task.files["shop/money.py"] = self.repository.files["shop/money.py"] + b"\n# no fault\n"
        return task


def test_what_is_ok_can_be_chosen(check, tmp_path):
    repository = str(write_repository(tmp_path / "shop"))
    done = check(Unmutated(repository, evaluation_share=0.5), num_tasks=50, rounds=1)
    verdicts = {t.id.partition("/shop/")[2]: t.verdict for t in done.tasks}
    assert {key for key, v in verdicts.items() if v is not Verdict.OK} == {"money.py::total::return-0"}
    report = tmp_path / "report.json"
    report.write_text(json.dumps(check_to_dict(done)))
    chosen = BugInjectionTaskset(repository, evaluation_share=0.5, checked=str(report))
    keys = {key.removeprefix("shop/") for split in Split for key in chosen.keys(split)}
    assert keys == verdicts.keys() - {"money.py::total::return-0"}


class WithImages:
    """The real backend, whose images are files that lie in the working directory already."""

    def __init__(self, backend, images) -> None:
        self.backend, self.images = backend, images

    async def start(self, files, limits, *, image="", base=None):
        return await self.backend.start({**(self.images[image] if image else {}), **files}, limits, base=base)

    async def drop(self, snapshot):
        await self.backend.drop(snapshot)


def write(folder: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def check_images(runner, backend, taskset, images):
    rubric = Rubric({"command": CommandGrader(timeout_s=60.0, memory_bytes=512 * 2**20)})
    settings = CheckSettings(num_tasks=9, rounds=2)
    done = runner.run(
        check_taskset(taskset, rubric, WithImages(backend, images), settings, splits=[Split.TRAIN]),
    )
    return {t.id.rpartition("/")[2]: (str(t.verdict), t.reason) for t in done.tasks}


def test_folders_of_harbor_and_terminal_bench(runner, backend, tmp_path):
    test_file = "from pathlib import Path\n\n\ndef test_it():\n    assert Path('hello.txt').read_text() == 'hello\\n'\n"
    harbor = {
        "task.toml": "",
        "instruction.md": "Write hello.txt.",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "if grep -qx hello hello.txt && [ ! -e README ]; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo hello > hello.txt; rm README\n",
    }
    bench = {
        "task.yaml": "instruction: Write hello.txt.\n",
        "Dockerfile": "FROM scratch\n",
        "run-tests.sh": "python3 -m pytest -p no:cacheprovider -rA $TEST_DIR/test_outputs.py\n",
        "tests/test_outputs.py": test_file,
        "solution.sh": "echo hello > hello.txt\n",
    }
    write(tmp_path / "harbor", harbor)
    write(tmp_path / "bench", bench)
    write(tmp_path / "unsolved", {p: c for p, c in harbor.items() if p != "solution/solve.sh"})
    write(tmp_path / "wrong", {**bench, "solution.sh": "touch hello.txt\n"})
    write(tmp_path / "fails", {**bench, "solution.sh": "exit 3\n"})
    taskset = HarborTaskset(str(tmp_path), evaluation_share=0.0)
    images = {taskset.task(Split.TRAIN, i).image: {"README": b"r"} for i in range(5)}
    found = check_images(runner, backend, taskset, images)
    assert found.keys() == {"harbor", "bench", "unsolved", "wrong", "fails"}
    assert found["harbor"] == found["bench"] == ("ok", "")
    assert found["unsolved"] == ("ok", "there is no reference: only the untouched state was graded")
    assert found["wrong"][0] == "broken reference" and "test_outputs.py::test_it among them" in found["wrong"][1]
    assert found["fails"][0] == "cannot run" and "ended with exit code 3" in found["fails"][1]


@pytest.mark.skipif(
    not shutil.which("git") and not shutil.which("patch"), reason="no git and no patch to solve it with"
)
def test_an_issue_in_an_image(runner, backend, tmp_path):
    record = {
        "instance_id": "shop-1",
        "image": "shop:1",
        "problem_statement": "total() forgets the fee",
        "patch": "--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(prices):\n-    return sum(prices)\n"
        "+    return sum(prices) + 2\n",
        "test_patch": "--- /dev/null\n+++ b/tests/test_shop.py\n@@ -0,0 +1,4 @@\n+import shop\n+\n+def test_fee():\n"
        "+    assert shop.total([1]) == 3\n",
        "FAIL_TO_PASS": ["tests/test_shop.py::test_fee"],
    }
    (tmp_path / "swe.jsonl").write_text(json.dumps(record))
    taskset = SweJsonlTaskset(str(tmp_path / "swe.jsonl"), evaluation_share=0.0)
    images = {"shop:1": {"shop.py": b"def total(prices):\n    return sum(prices)\n"}}
    assert check_images(runner, backend, taskset, images) == {"shop-1": ("ok", "")}
