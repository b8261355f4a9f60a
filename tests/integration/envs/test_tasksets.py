"""Tasksets with real sandboxes and real graders: right solutions pass, wrong ones do not."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from composer.types import Split
from envs.grading.command_grader import CommandGrader
from envs.grading.pytest_grader import PytestGrader
from envs.tasks.bug_injection import BugInjectionTaskset
from envs.tasks.codeio import CodeioTaskset
from envs.tasks.codeio_cases import add_cases, write_records
from envs.tasks.feature_deletion import FeatureDeletionTaskset
from envs.tasks.folder import FolderTaskset
from envs.tasks.humaneval import HumanEvalTaskset
from envs.tasks.swe_jsonl import SweJsonlTaskset

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "envs" / "tasks"))
from small_repository import write_repository  # noqa: E402


@pytest.fixture(scope="module")
def grade(runner, backend):
    graders = {"pytest": PytestGrader(), "command": CommandGrader(timeout_s=60.0, memory_bytes=512 * 2**20)}

    def run(task, files, grader="pytest"):
        return runner.run(graders[grader].grade(task, files, backend))

    return run


def tasks_of(taskset):
    return {key: taskset.task(split, i) for split in Split for i, key in enumerate(taskset.keys(split))}


PROBLEMS = {
    "T/0": (
        'def split(text: str):\n    """ The first half and the second. """\n',
        "split",
        "    return text[: len(text) // 2], text[len(text) // 2 :]\n",
        "def check(candidate):\n    assert candidate('abcd') == ('ab', 'cd')\n    assert candidate('') == ('', '')\n",
    ),
    "T/1": (
        'def shift(text: str):\n    """ Every letter moved by one. """\n'
        '    return "".join(chr(ord(c) + 1) for c in text)\n'
        '\n\ndef unshift(text: str):\n    """ What shift made text of. """\n',
        "unshift",
        '    return "".join(chr(ord(c) - 1) for c in text)\n',
        "def check(candidate):\n    for text in ('abc', ''):\n        assert candidate(shift(text)) == text\n",
    ),
    "T/2": (
        'import math\n\n\ndef kinds(values):\n    """ How many of each type, with the types\' names in a set. """\n',
        "kinds",
        "    names = [type(v).__name__ for v in values]\n    return {n: names.count(n) for n in names}, set(names)\n",
        "def check(candidate):\n"
        "    assert candidate({1: 'a', (2, 3): None}) == ({'int': 1, 'tuple': 1}, {'int', 'tuple'})\n"
        "    assert math.isclose(len(candidate([])), 2)\n",
    ),
}


def test_humaneval(grade, tmp_path):
    fields = ("prompt", "entry_point", "canonical_solution", "test")
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        for task_id, values in PROBLEMS.items():
            file.write(json.dumps({"task_id": task_id, **dict(zip(fields, values, strict=True))}) + "\n")
    taskset = HumanEvalTaskset(str(tmp_path / "x.jsonl.gz"))
    tasks = tasks_of(taskset)
    for task in tasks.values():
        assert grade(task, task.files).score == 0.0
        verdict = grade(task, taskset.reference(task))
        assert verdict.score == 1.0, verdict.details
    wrong = {
        "T/0": "return [text[: len(text) // 2], text[len(text) // 2 :]]",  # a list is no tuple
        "T/1": "return shift(text)",
        "T/2": "raise ValueError",
    }
    for key, statement in wrong.items():
        main = tasks[key].files["main.py"].decode() + f"    {statement}\n"
        assert grade(tasks[key], {"main.py": main.encode()}).score == 0.0
    trick = b"class Any(str):\n    def __eq__(self, other): return True\n    def __repr__(self): return 'Any()'\n"
    trick += tasks["T/1"].files["main.py"] + b"    return Any()\n"
    assert grade(tasks["T/1"], {"main.py": trick}).score == 0.0


RECORDS = [
    {
        "task_description": "The mean of the numbers, and the largest.",
        "input_output_spec": "numbers (list of int) -> mean (float), largest (int)",
        "code_sample": "import statistics\n\n\ndef main_solution(numbers):\n"
        '    return {"mean": statistics.mean(numbers), "largest": max(numbers)}\n',
        "input_generator": "def generate_inputs(rng: Random) -> dict:\n"
        '    return {"numbers": [rng.randint(0, 9) for _ in range(5)]}\n',
    },
    {
        "query": "?",
        "parameters": "?",
        "reference_code": "def main_solution(a):\n    return a\n",
        "input_generator": "def input_generator():\n    raise ValueError\n",
    },
]


def test_codeio(grade, runner, backend, tmp_path):
    records = runner.run(add_cases(RECORDS, backend))
    assert records == runner.run(add_cases(RECORDS, backend))
    [record] = records
    assert len(record["cases"]) == 2
    for case in record["cases"]:
        numbers = case["input"]["numbers"]
        assert case["output"] == {"mean": sum(numbers) / 5, "largest": max(numbers)}
    write_records(records, tmp_path / "x.jsonl.gz")
    taskset = CodeioTaskset(str(tmp_path / "x.jsonl.gz"), kinds=["implement", "output", "input"])
    tasks = {task.metadata["kind"]: task for task in tasks_of(taskset).values()}
    assert len(tasks) == 3
    for task in tasks.values():
        assert grade(task, task.files).score == 0.0
        verdict = grade(task, taskset.reference(task))
        assert verdict.score == 1.0, verdict.details
    own = "def main_solution(numbers):\n    return {{'mean': sum(numbers) / {}, 'largest': sorted(numbers)[-1]}}\n"
    for divisor, score in (("len(numbers)", 1.0), ("4", 0.0)):
        assert grade(tasks["implement"], {"main.py": own.format(divisor).encode()}).score == score
    case = record["cases"][0]
    numbers = case["input"]["numbers"]
    for answer, score in (({"numbers": numbers[::-1]}, 1.0), ({"numbers": [*numbers, 10]}, 0.0), (numbers, 0.0)):
        left = {**tasks["input"].files, "answer.json": json.dumps(answer).encode()}
        assert grade(tasks["input"], left).score == score
    near = {**case["output"], "mean": case["output"]["mean"] + 1e-12}
    for answer, score in ((json.dumps(near), 1.0), ('{"mean": 1}', 0.0), ("print(1)", 0.0)):
        left = {**tasks["output"].files, "answer.json": answer.encode()}
        assert grade(tasks["output"], left).score == score


def test_bug_injection(grade, tmp_path):
    taskset = BugInjectionTaskset(str(write_repository(tmp_path)), max_per_function=100)
    tasks = tasks_of(taskset)
    verdict = grade(next(iter(tasks.values())), taskset.reference(next(iter(tasks.values()))))
    assert verdict.score == 1.0, verdict.details
    unnoticed = {key for key, task in tasks.items() if grade(task, task.files).score == 1.0}
    assert unnoticed == set()
    # total: 2, cents: 3, Cart.add: 4, Cart.sum: 1.
    assert len(tasks) == 10


def test_tests_that_are_skipped_are_no_fault_for_a_command(grade, tmp_path):
    test = "import pytest\n\n\n@pytest.mark.skip\ndef test_later(): assert False\n"
    for make in (BugInjectionTaskset, FeatureDeletionTaskset):
        taskset = make(str(write_repository(tmp_path, {"tests/test_more.py": test})), evaluation_share=0.0)
        task = taskset.task(Split.TRAIN, 0)
        assert grade(task, taskset.reference(task), "pytest").score == 0.0
        verdict = grade(task, taskset.reference(task), "command")
        assert verdict.score == 1.0, verdict.details
        assert grade(task, task.files, "command").score == 0.0


def test_feature_deletion(grade, tmp_path):
    taskset = FeatureDeletionTaskset(str(write_repository(tmp_path)))
    for task in tasks_of(taskset).values():
        assert grade(task, task.files).score == 0.0
        verdict = grade(task, taskset.reference(task))
        assert verdict.score == 1.0, verdict.details
        # The tests that were left to the agent do not pass for the whole.
        assert grade(task, {**taskset.reference(task), "shop/money.py": b"def total(*a): return 2\n"}).score == 0.0


def test_a_folder(grade, tmp_path):
    folder = tmp_path / "sum"
    for path, content in {
        "request.md": "mend it",
        "files/main.py": "def add(a, b):\n    return a - b\n",
        "tests/test_hidden.py": "from composer_solution import call\n\n\ndef test_add():\n"
        "    assert call('main.add', 1, 2) == 3\n",
        "solution/main.py": "def add(a, b):\n    return a + b\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    taskset = FolderTaskset(str(tmp_path))
    [task] = tasks_of(taskset).values()
    assert [grade(task, files).score for files in (task.files, taskset.reference(task))] == [0.0, 1.0]
    (folder / "task.yaml").write_text("metadata: {grading: {command: 'grep -q + main.py'}}\n")
    taskset = FolderTaskset(str(tmp_path))
    [task] = tasks_of(taskset).values()
    assert [grade(task, files, "command").score for files in (task.files, taskset.reference(task))] == [0.0, 1.0]


def test_swe_jsonl(grade, tmp_path):
    base = tmp_path / "repositories" / "shop-1"
    base.mkdir(parents=True)
    (base / "shop.py").write_text("def total(prices):\n    return sum(prices)\n")
    (base / "test_shop.py").write_text("import shop\n\n\ndef test_empty():\n    assert shop.total([]) in (0, 2)\n")
    record = {
        "instance_id": "shop-1",
        "problem_statement": "total() forgets the fee",
        "patch": "--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(prices):\n-    return sum(prices)\n"
        "+    return sum(prices) + 2\n",
        "test_patch": "--- a/test_shop.py\n+++ b/test_shop.py\n@@ -3,3 +3,7 @@\n \n def test_empty():\n"
        "     assert shop.total([]) in (0, 2)\n+\n+\n+def test_fee():\n+    assert shop.total([1]) == 3\n",
        "FAIL_TO_PASS": ["test_shop.py::test_fee"],
        "PASS_TO_PASS": ["test_shop.py::test_empty"],
    }
    (tmp_path / "swe.jsonl").write_text(json.dumps(record))
    for command in ("python3 -m pytest --junitxml={report} {test_files}", "python3 -m pytest -rA {test_files}"):
        taskset = SweJsonlTaskset(
            str(tmp_path / "swe.jsonl"), repositories=str(tmp_path / "repositories"), test_command=command
        )
        [task] = tasks_of(taskset).values()
        verdict = grade(task, task.files, "command")
        assert verdict.score == 0.0 and "1 of 2 tests did not pass, test_shop" in verdict.details["reason"]
        verdict = grade(task, taskset.reference(task), "command")
        assert verdict.score == 1.0, verdict.details
        forged = {**task.files, "test_shop.py": b"def test_fee(): pass\ndef test_empty(): pass\n"}
        assert grade(task, forged, "command").score == 0.0
