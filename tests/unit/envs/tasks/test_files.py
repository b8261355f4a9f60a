"""Task files of somebody else's making: pipes, endless files, bombs. None holds the process up, each is one error."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from composer.errors import ComposerError, ConfigError, TaskError
from composer.types import Split
from envs.tasks.files import parse_yaml, read_file, read_text
from envs.tasks.folder import FolderTaskset
from envs.tasks.harbor import HarborTaskset
from envs.tasks.humaneval import HumanEvalTaskset
from envs.tasks.records import read_records
from envs.tasks.swe_jsonl import SweJsonlTaskset
from envs.tasks.trees import read_tree

LAUGHS = "metadata:\n  a0: &a0 [x, x]\n" + "".join(f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
FOLDER = {"request.md": "add\n", "tests/test_a.py": "def test_a(): pass\n"}
HARBOR = {"task.toml": "", "instruction.md": "add\n", "environment/Dockerfile": "FROM a\n", "tests/test.sh": "true\n"}
TERMINAL_BENCH = {"task.yaml": "instruction: add\n", "Dockerfile": "FROM a\n", "run-tests.sh": "true\n"}


@pytest.fixture(autouse=True)
def no_waiting():
    """A pipe that is waited for is a failure, not a test that never ends."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def read_all(taskset) -> None:
    for split in Split:
        for index in range(taskset.num_tasks(split) or 0):
            taskset.task(split, index)


@pytest.mark.parametrize("trick", [pipe, endless])
@pytest.mark.parametrize(
    ("kind", "files", "name"),
    [
        *((FolderTaskset, FOLDER, name) for name in ("request.md", "task.yaml", "tests/test_a.py", "files/a.py")),
        *((HarborTaskset, HARBOR, name) for name in ("task.toml", "instruction.md", "tests/data")),
        *((HarborTaskset, TERMINAL_BENCH, name) for name in ("task.yaml", "run-tests.sh", "tests/data")),
    ],
)
def test_what_is_no_file_of_a_tasks_size_is_refused(tmp_path, kind, files, name, trick):
    folder = write(tmp_path / "tasks" / "one", files)
    (folder / name).parent.mkdir(exist_ok=True)
    trick(folder / name)
    with pytest.raises(ComposerError) as caught:
        read_all(kind(str(tmp_path / "tasks")))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", [LAUGHS, "metadata: &a [*a]\n", "[" * 5000, f"timeout: {'1' * 5000}\n"])
def test_yaml_bombs_are_one_sentence(tmp_path, text):
    write(tmp_path / "tasks" / "one", {**FOLDER, "task.yaml": text})
    with pytest.raises(TaskError, match=r"one: task\.yaml is no YAML \("):
        FolderTaskset(str(tmp_path / "tasks"))
    write(tmp_path / "bench" / "one", {**TERMINAL_BENCH, "task.yaml": text})
    with pytest.raises(TaskError, match=r"one: task\.yaml cannot be read \("):
        HarborTaskset(str(tmp_path / "bench"))


def test_an_alias_is_refused_and_says_what_to_do():
    assert parse_yaml("a: &b 1\nc: 2\n") == {"a": 1, "c": 2}
    with pytest.raises(yaml.YAMLError, match="alias .* is not read: write its value out"):
        parse_yaml("a: &b 1\nc: *b\n")


def test_toml_that_is_nested_without_end(tmp_path):
    write(tmp_path / "tasks" / "one", {**HARBOR, "task.toml": f"a = {'[' * 5000}"})
    with pytest.raises(TaskError, match=r"task\.toml cannot be read \("):
        HarborTaskset(str(tmp_path / "tasks"))


@pytest.mark.parametrize("trick", [pipe, endless])
@pytest.mark.parametrize("kind", [HumanEvalTaskset, SweJsonlTaskset])
def test_data_sets_are_regular_files(tmp_path, kind, trick):
    trick(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError, match=r"regular file|more than \d+ bytes"):
        kind(str(tmp_path / "data.jsonl"))


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"a": "x" * 10**6}).encode()))
    assert len(read_records(path, ["a"])[0]["a"]) == 10**6
    monkeypatch.setattr("envs.tasks.records.MAX_RECORDS_BYTES", 10**6)
    with pytest.raises(ConfigError, match="it has more than 1000000 bytes"):
        read_records(path, ["a"])


def test_records_that_are_nested_without_end(tmp_path):
    (tmp_path / "data.jsonl").write_text("{" + '"a":[' * 100_000)
    with pytest.raises(ConfigError, match="line 1 is no JSON"):
        read_records(tmp_path / "data.jsonl", ["a"])


def test_a_file_has_its_bound_exactly(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_file(tmp_path / "a", 4)
    with pytest.raises(OSError, match="no regular file"):
        read_file(tmp_path, 4)
    (tmp_path / "a").write_bytes("é\r\nb\rc".encode())
    assert read_text(tmp_path / "a") == "é\nb\nc"


def test_a_tree_is_neither_too_deep_nor_too_wide(tmp_path, monkeypatch):
    deep = tmp_path / "deep"
    (deep / "/".join("d" * 300)).mkdir(parents=True)
    with pytest.raises(TaskError, match="folders deep"):
        read_tree(deep)
    write(tmp_path / "wide", dict.fromkeys("abc", "x"))
    monkeypatch.setattr("envs.tasks.trees._MAX_ENTRIES", 2)
    with pytest.raises(TaskError, match="more than 2 files"):
        read_tree(tmp_path / "wide")
