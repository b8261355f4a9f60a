"""Task folders that somebody wrote by hand: what is read, and what is refused in one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split
from envs.tasks.folder import FolderTaskset
from envs.tasks.trees import read_tree


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


MINIMAL = {"request.md": "add two numbers\n", "tests/test_hidden.py": "def test_a(): pass\n"}


def load(root: Path, **options) -> FolderTaskset:
    return FolderTaskset(str(root), evaluation_share=0.0, **options)


def test_a_task_in_full(tmp_path):
    write(
        tmp_path / "sum",
        {
            **MINIMAL,
            "files/main.py": "x",
            "files/pkg/data.bin": b"\0\xff",
            "files/__pycache__/main.cpython-311.pyc": b"",
            "solution/main.py": "y",
            "solution/new.py": "z",
            "task.yaml": "id: adder\nimage: python:3.11\nsplit: evaluation\ntimeout: 5\nmetadata: {level: 2}\n",
        },
    )
    write(tmp_path / "_draft", {"request.md": ""})
    taskset = load(tmp_path, name="mine")
    task = taskset.task(Split.EVALUATION, 0)
    assert task.id == "mine/evaluation/adder"
    assert task.request == "add two numbers"
    assert task.files == {"main.py": b"x", "pkg/data.bin": b"\0\xff"}
    assert task.hidden_tests == {"test_hidden.py": b"def test_a(): pass\n"}
    assert task.image == "python:3.11"
    assert task.metadata == {"level": 2, "timeout_s": 5.0}
    assert taskset.reference(task) == {"main.py": b"y", "pkg/data.bin": b"\0\xff", "new.py": b"z"}
    assert taskset.keys(Split.TRAIN) == []


def test_the_least_that_is_a_task(tmp_path):
    write(tmp_path / "sum", {**MINIMAL})
    (tmp_path / "README.txt").write_text("my tasks")
    taskset = load(tmp_path)
    task = taskset.task(Split.TRAIN, 0)
    assert (task.id, task.files, task.image, task.metadata) == ("folder/train/sum", {}, "", {})
    assert taskset.reference(task) is None


WRONG = {
    "no request": ({"request.md": None}, "it needs a request.md or a request.txt, and has none"),
    "two requests": ({"request.txt": "x"}, "it needs a request.md or a request.txt, and has both"),
    "no tests": ({"tests/test_hidden.py": None}, "it has no tests/ with hidden tests: without them there is no reward"),
    "a file for a folder": ({"files": "x"}, "files is no folder: make it one"),
    "a slip": ({"test/test_a.py": "x"}, "test is none of files, request.md, request.txt, solution, task.yaml, tests: "),
    "no YAML": ({"task.yaml": "a: [\n"}, "task.yaml is no YAML ("),
    "a list": ({"task.yaml": "- a\n"}, "task.yaml must hold keys and values, and holds ['a']"),
    "unknown key": ({"task.yaml": "time: 1\n"}, "task.yaml has an unknown key 'time': the keys are id, image, split, "),
    "a type": ({"task.yaml": "image: 3\n"}, "task.yaml: image must be a text, and is 3"),
    "a truth value": ({"task.yaml": "timeout: yes\n"}, "task.yaml: timeout must be a number, and is True"),
    "no time": ({"task.yaml": "timeout: 0\n"}, "task.yaml: timeout=0 must be more than 0 seconds"),
    "a split": ({"task.yaml": "split: test\n"}, "task.yaml: split='test' must be train or evaluation"),
    "metadata": ({"task.yaml": "metadata: x\n"}, "task.yaml: metadata must be keys and values, and is 'x'"),
    "no name": ({"task.yaml": "id: ''\n"}, "task.yaml: id is empty: name the task"),
    "bytes": ({"task.yaml": b"\xff"}, "task.yaml is no UTF-8 text ("),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_malformed_folder_is_one_sentence_that_names_it(tmp_path, change, message):
    folder = write(tmp_path / "sum", {p: c for p, c in {**MINIMAL, **change}.items() if c is not None})
    with pytest.raises(TaskError, match="^" + re.escape(f"Task folder {folder}: {message}")) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("request_", "message"), [("  \n", "is empty"), (b"\xff", "is no UTF-8 text")])
def test_a_request_that_says_nothing(tmp_path, request_, message):
    folder = write(tmp_path / "sum", {**MINIMAL, "request.md": request_})
    with pytest.raises(TaskError, match=re.escape(f"Task folder {folder}: request.md {message}")):
        load(tmp_path).task(Split.TRAIN, 0)


def test_what_is_no_folder_of_tasks(tmp_path):
    with pytest.raises(ConfigError, match=r"args\.path=.*: there is no task in it"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"args\.path=.*nowhere'.*\(No such file or directory\)"):
        load(tmp_path / "nowhere")
    write(tmp_path / "a", {**MINIMAL, "task.yaml": "id: same"})
    write(tmp_path / "b", {**MINIMAL, "task.yaml": "id: same"})
    with pytest.raises(TaskError, match=r"/a and .*/b have one id, same: change one"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["files/link", "tests/link", "solution/link"])
def test_links_lead_to_files_of_the_task_and_nowhere_else(tmp_path, place):
    secret = write(tmp_path, {"secret.txt": "s"}) / "secret.txt"
    root = tmp_path / "tasks"
    folder = write(root / "sum", {**MINIMAL, "files/a.txt": "a", "solution/a.txt": "b"})
    link = folder / place

    def read():
        taskset = load(root)
        return taskset.reference(taskset.task(Split.TRAIN, 0))

    for target, message in (
        (secret, "is a symbolic link that leads out of"),
        (Path("../../../secret.txt"), "is a symbolic link that leads out of"),
        (tmp_path, "is a symbolic link that leads out of"),
        (Path("nothing"), "is a symbolic link that leads nowhere"),
        (Path("link"), "is a symbolic link that leads nowhere"),
        (Path(), "is a symbolic link to a folder"),
    ):
        link.symlink_to(target)
        with pytest.raises(TaskError, match=re.escape(f"{link} {message}")):
            read()
        link.unlink()
    link.symlink_to(Path("../files/a.txt"))
    if place != "tests/link":
        assert read()["link"] == b"a"
    link.unlink()


@pytest.mark.parametrize("name", ["files", "tests", "solution", "request.md", "task.yaml"])
def test_no_part_of_a_task_is_a_link_out_of_it(tmp_path, name):
    outside = write(tmp_path / "outside", {**MINIMAL, "files/a": "", "solution/a": "", "task.yaml": ""})
    root = tmp_path / "tasks"
    folder = write(root / "sum", MINIMAL)
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "away")
    (folder / name).symlink_to(outside / name)
    with pytest.raises(TaskError, match=f"Task folder .*/sum: {name} is a symbolic link that leads out of it"):
        load(root)


def test_a_tasks_folder_is_no_link_out_of_the_tasks(tmp_path):
    write(tmp_path / "outside", MINIMAL)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sum").symlink_to(tmp_path / "outside")
    with pytest.raises(TaskError, match=r"Task folder .*/sum: it is no folder in .*leads out of it"):
        load(tmp_path / "tasks")


def test_a_tree_has_bounds(tmp_path):
    write(tmp_path, {"a": b"12345", "b/c": b"678"})
    assert read_tree(tmp_path, max_bytes=8) == {"a": b"12345", "b/c": b"678"}
    with pytest.raises(TaskError, match=f"The files in {tmp_path} have more than 7 bytes"):
        read_tree(tmp_path, max_bytes=7)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match=r"/pipe is neither a file nor a folder: remove it"):
        read_tree(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"")
    with pytest.raises(TaskError, match="holds a name that is no UTF-8"):
        read_tree(tmp_path)
