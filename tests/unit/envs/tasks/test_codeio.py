"""Records in CodeI/O's shape; nothing of them is run here (tests/integration/envs does, in sandboxes)."""

from __future__ import annotations

import gzip
import json

import pytest

from composer.errors import ConfigError
from composer.types import Split
from envs.grading.hidden_tests import expected_tests, runs_apart
from envs.tasks.codeio import CodeioTaskset
from envs.tasks.codeio_cases import write_records

RECORD = {
    "query": "How much is the sum?",
    "parameters": "Input: a (int), b (int). Output: an int.",
    "reference_code": "import os\nos.abort()  # would end us\n\n\ndef main_solution(a: Big, b=os.sep, *, c=2):\n"
    "    return a + c\n",
    "input_generator": "def input_generator():\n    os.abort()\n",
    "cases": [{"input": {"a": 1}, "output": None}, {"input": {"a": 1}, "output": 3}],
}


def load(tmp_path, *records, **options):
    path = tmp_path / "codeio.jsonl.gz"
    write_records(records or [RECORD], path)
    return CodeioTaskset(str(path), evaluation_share=0.0, **options)


def test_to_implement(tmp_path):
    taskset = load(tmp_path)
    task = taskset.task(Split.TRAIN, 0)
    assert task.request == (
        "How much is the sum?\n\nWrite it as main_solution in main.py.\n\nInput: a (int), b (int). Output: an int."
    )
    assert task.files == {"main.py": b"def main_solution(a, b=None, *, c=2):\n    raise NotImplementedError\n"}
    assert taskset.reference(task) == {"main.py": RECORD["reference_code"].encode()}
    assert expected_tests(task) == {f"test_hidden.py::test_case_{i}" for i in range(5)} and runs_apart(task)
    assert task.metadata == {"kind": "implement", "function": "main_solution"}


def test_to_predict(tmp_path):
    taskset = load(tmp_path, kinds=["output", "input"])
    tasks = [taskset.task(Split.TRAIN, i) for i in range(2)]
    output, input_ = sorted(tasks, key=lambda t: t.metadata["kind"] == "input")
    # The first case's output is what an untouched answer.json says.
    program = {"program.py": RECORD["reference_code"].encode(), "answer.json": b"null\n"}
    assert output.files == {**program, "input.json": b'{"a": 1}\n'}
    assert taskset.reference(output)["answer.json"] == b"3\n"
    assert input_.files == {**program, "output.json": b"3\n"}
    assert taskset.reference(input_)["answer.json"] == b'{"a": 1}\n'
    for task in tasks:
        assert expected_tests(task) == {"test_hidden.py::test_answer"} and runs_apart(task)
        assert "main_solution in program.py" in task.request


def test_all_tasks_of_a_function_are_in_one_split(tmp_path):
    records = [{**RECORD, "reference_code": f"def main(a):\n    return {i}\n"} for i in range(8)]
    write_records(records, tmp_path / "x.jsonl")  # compressed under whatever name
    (tmp_path / "x.jsonl").rename(tmp_path / "x.jsonl.gz")
    taskset = CodeioTaskset(str(tmp_path / "x.jsonl.gz"), kinds=["implement", "output", "input"], evaluation_share=0.5)
    functions = [{key.split("/")[0] for key in taskset.keys(split)} for split in Split]
    assert all(functions) and not functions[0] & functions[1]
    assert [len(taskset.keys(split)) for split in Split] == [3 * len(f) for f in functions]
    # One function twice is one task.
    assert load(tmp_path, RECORD, RECORD).keys(Split.TRAIN) == load(tmp_path).keys(Split.TRAIN)


def test_what_is_of_no_use_is_left_out_or_named(tmp_path):
    bad = [{**RECORD, "reference_code": code} for code in ("def other(): pass", "def main(:", "\0", "main = 3")]
    assert len(load(tmp_path, RECORD, *bad).keys(Split.TRAIN)) == 1
    with pytest.raises(ConfigError, match=r"no record in it defines main_solution or main"):
        load(tmp_path, *bad)
    without = {k: v for k, v in RECORD.items() if k != "cases"}
    for cases in (None, [], [3], [{"input": 3, "output": 3}], [{"input": {}, "output": None}]):
        with pytest.raises(ConfigError, match="no record with `cases` in it defines"):
            load(tmp_path, {**without, "cases": cases}, kinds=["output"])
    with pytest.raises(ConfigError, match=r"args\.kinds=\['guess'\]: must be some of implement, output, input"):
        load(tmp_path, kinds=["guess"])
    with pytest.raises(ConfigError, match=r"pip install reasoning-gym"):
        CodeioTaskset()


def test_records_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_records([RECORD], path)
    with pytest.raises(TypeError):
        write_records([{"bytes": b""}], path)
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == [RECORD]
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]
