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
    "task_description": "How much is the sum?",
    "input_output_spec": "Input: a (int), b (int). Output: an int.",
    "code_sample": "import os\nos.abort()  # would end us\n\n\ndef main_solution(a: Big, b=os.sep, *, c=2):\n"
    "    return a + c\n",
    "input_generator": "def generate_inputs(rng: Random):\n    os.abort()\n",
    "difficulty": 3,
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
    assert taskset.reference(task) == {"main.py": RECORD["code_sample"].encode()}
    assert expected_tests(task) == {f"test_hidden.py::test_case_{i}" for i in range(5)} and runs_apart(task)
    assert task.metadata == {"kind": "implement", "function": "main_solution", "difficulty": 3}


def test_to_predict(tmp_path):
    taskset = load(tmp_path, kinds=["output", "input"])
    tasks = [taskset.task(Split.TRAIN, i) for i in range(2)]
    output, input_ = sorted(tasks, key=lambda t: t.metadata["kind"] == "input")
    # The first case's output is what an untouched answer.json says.
    program = {"program.py": RECORD["code_sample"].encode(), "answer.json": b"null\n"}
    assert output.files == {**program, "input.json": b'{"a": 1}\n'}
    assert taskset.reference(output)["answer.json"] == b"3\n"
    assert input_.files == {**program, "output.json": b"3\n"}
    assert taskset.reference(input_)["answer.json"] == b'{"a": 1}\n'
    for task in tasks:
        assert expected_tests(task) == {"test_hidden.py::test_answer"} and runs_apart(task)
        assert "main_solution in program.py" in task.request


def test_all_tasks_of_a_function_are_in_one_split(tmp_path):
    records = [{**RECORD, "code_sample": f"def main(a):\n    return {i}\n"} for i in range(8)]
    write_records(records, tmp_path / "x.jsonl")  # compressed under whatever name
    (tmp_path / "x.jsonl").rename(tmp_path / "x.jsonl.gz")
    taskset = CodeioTaskset(str(tmp_path / "x.jsonl.gz"), kinds=["implement", "output", "input"], evaluation_share=0.5)
    functions = [{key.split("/")[0] for key in taskset.keys(split)} for split in Split]
    assert all(functions) and not functions[0] & functions[1]
    assert [len(taskset.keys(split)) for split in Split] == [3 * len(f) for f in functions]
    # One function twice is one task.
    assert load(tmp_path, RECORD, RECORD).keys(Split.TRAIN) == load(tmp_path).keys(Split.TRAIN)


def test_what_is_of_no_use_is_left_out_or_named(tmp_path):
    bad = [{**RECORD, "code_sample": code} for code in ("def other(): pass", "def main(:", "\0", "main = 3")]
    assert len(load(tmp_path, RECORD, *bad).keys(Split.TRAIN)) == 1
    bad += [{**RECORD, "input_generator": code} for code in ("def other(): pass", "def generate_inputs(:")]
    bad += [{k: v for k, v in RECORD.items() if k != "task_description"}]
    with pytest.raises(ConfigError, match=r"no record in it defines main_solution or main and generate_inputs or gen"):
        load(tmp_path, *bad)
    random = "import random\n\n\ndef main_solution(a):\n    return a"
    assert len(load(tmp_path, {**RECORD, "code_sample": random}).keys(Split.TRAIN)) == 1
    for chance in (f"{random} + random.random()\n", f"from random import choice\n{random}\n"):
        with pytest.raises(ConfigError, match="leaves nothing to chance"):
            load(tmp_path, {**RECORD, "code_sample": chance})
    numpy = {**RECORD, "code_sample": "def main_solution(a):\n    import numpy.linalg as np\n    return a\n"}
    assert len(load(tmp_path, RECORD, numpy).keys(Split.TRAIN)) == 1
    assert len(load(tmp_path, RECORD, numpy, modules=["numpy"]).keys(Split.TRAIN)) == 2
    without = {k: v for k, v in RECORD.items() if k != "cases"}
    for cases in (None, [], [3], [{"input": 3, "output": 3}], [{"input": {}, "output": None}]):
        with pytest.raises(ConfigError, match="no record with `cases` in it defines"):
            load(tmp_path, {**without, "cases": cases}, kinds=["output"])
    with pytest.raises(ConfigError, match=r"args\.kinds=\['guess'\]: must be some of implement, output, input"):
        load(tmp_path, kinds=["guess"])
    with pytest.raises(ConfigError, match=r"pip install reasoning-gym"):
        CodeioTaskset()


def test_other_names_of_fields_and_a_list_in_place_of_lines(tmp_path):
    names = {"task_description": "query", "input_output_spec": "parameters", "code_sample": "reference_code"}
    old = {names.get(key, key): value for key, value in RECORD.items()}
    old["input_generator"] = "def input_generator():\n    return {}\n"
    for name, content in (("a.json", json.dumps([old], indent=4)), ("b.json", json.dumps([old]) + "\n")):
        (tmp_path / name).write_text(content)
        task = CodeioTaskset(str(tmp_path / name), evaluation_share=0.0).task(Split.TRAIN, 0)
        new = load(tmp_path).task(Split.TRAIN, 0)
        assert (task.id, task.request, task.files) == (new.id, new.request, new.files)
        assert b"generate()" in task.hidden_tests["test_hidden.py"]
        assert b"generate(random.Random(number))" in new.hidden_tests["test_hidden.py"]
    (tmp_path / "c.json").write_text(json.dumps([RECORD, 3]))
    with pytest.raises(ConfigError, match="record 2 is no JSON object"):
        CodeioTaskset(str(tmp_path / "c.json"))


def test_records_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_records([RECORD], path)
    with pytest.raises(TypeError):
        write_records([{"bytes": b""}], path)
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == [RECORD]
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]
