"""Instances in SWE-bench's shape."""

from __future__ import annotations

import json

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split
from envs.grading.command_grader import Recipe
from envs.tasks.swe_jsonl import SweJsonlTaskset

INSTANCE = {
    "instance_id": "acme__shop-1",
    "repo": "acme/shop",
    "base_commit": "abc",
    "problem_statement": "total() forgets the fee\n",
    "patch": "--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(prices):\n-    return sum(prices)\n"
    "+    return sum(prices) + 2\n",
    "test_patch": "--- /dev/null\n+++ b/test_shop.py\n@@ -0,0 +1 @@\n+x\n",
    "FAIL_TO_PASS": '["test_shop.py::test_fee"]',
    "PASS_TO_PASS": ["tests/test it.py::TestA::test_b", "test_shop.py::test_sum"],
}
SHOP = "def total(prices):\n    return sum(prices)\n"


def write(folder, *instances):
    path = folder / "swe.jsonl"
    path.write_text("".join(json.dumps(instance) + "\n" for instance in instances))
    return str(path)


def test_a_task_with_an_image(tmp_path):
    taskset = SweJsonlTaskset(
        write(tmp_path, INSTANCE), image="eval.{tag}:{instance_id}-{base_commit}", timeout_s=9.0, evaluation_share=0.0
    )
    task = taskset.task(Split.TRAIN, 0)
    assert task.id == "swe/train/acme__shop-1"
    assert task.request == "total() forgets the fee"
    assert task.files == {}
    assert task.image == "eval.acme_1776_shop-1:acme__shop-1-abc"
    assert task.hidden_tests == {"tests.patch": INSTANCE["test_patch"].encode()}
    assert (task.metadata["repo"], task.metadata["base_commit"]) == ("acme/shop", "abc")
    assert Recipe.of(task) == Recipe(
        command="python3 -m pytest -p no:cacheprovider --junitxml={report} test_shop.py 'tests/test it.py'",
        report="junit",
        fail_to_pass=("test_shop.py::test_fee",),
        pass_to_pass=("tests/test it.py::TestA::test_b", "test_shop.py::test_sum"),
        patch="tests.patch",
        timeout_s=9.0,
        kept=("shop.py",),  # the right patch changes it
    )
    assert taskset.reference(task) is None
    files, command = taskset.solver(task)
    assert files == {".composer_solution.patch": INSTANCE["patch"].encode()}
    assert command == "git apply .composer_solution.patch || patch -p1 -i .composer_solution.patch"


def test_what_an_instance_says_itself_comes_first(tmp_path):
    own = {**INSTANCE, "image_name": "own:1", "test_command": "pytest -rA {test_files}"}
    taskset = SweJsonlTaskset(write(tmp_path, own), image="other", evaluation_share=0.0)
    task = taskset.task(Split.TRAIN, 0)
    assert task.image == "own:1"
    assert Recipe.of(task).command == "pytest -rA test_shop.py 'tests/test it.py'"
    assert Recipe.of(task).report == "pytest"


def test_a_task_with_a_folder(tmp_path):
    folder = tmp_path / "repositories" / "acme__shop-1"
    folder.mkdir(parents=True)
    (folder / "shop.py").write_text(SHOP)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    path = write(tmp_path, INSTANCE, {**INSTANCE, "instance_id": "acme__shop-2"})
    taskset = SweJsonlTaskset(path, repositories=str(tmp_path / "repositories"), evaluation_share=0.0)
    tasks = {}
    for index, key in enumerate(taskset.keys(Split.TRAIN)):
        if key == "acme__shop-2":
            with pytest.raises(
                TaskError, match=r"Instance acme__shop-2 has no base state: .*acme__shop-2 is no folder"
            ):
                taskset.task(Split.TRAIN, index)
        else:
            tasks[key] = taskset.task(Split.TRAIN, index)
    [task] = tasks.values()
    assert task.image == "" and task.files == {"shop.py": SHOP.encode()}
    assert taskset.reference(task) == {"shop.py": b"def total(prices):\n    return sum(prices) + 2\n"}
    (folder / "shop.py").write_text("other\n")
    with pytest.raises(
        TaskError, match=r"The patch of instance acme__shop-1 cannot be applied: hunk 1 of shop.py does"
    ):
        taskset.reference(taskset.task(Split.TRAIN, taskset.keys(Split.TRAIN).index("acme__shop-1")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": "../x"}, r"instance_id='../x' is no name of a folder"),
        ({"patch": None}, "line 1 has no text 'patch'"),
        ({"FAIL_TO_PASS": []}, "instance acme__shop-1: FAIL_TO_PASS is empty, so nothing tells right from wrong"),
        ({"FAIL_TO_PASS": "[3]"}, "instance acme__shop-1: FAIL_TO_PASS is no list of texts"),
        ({"PASS_TO_PASS": "["}, "instance acme__shop-1: Expecting value"),
        ({"test_patch": "words"}, "instance acme__shop-1: it changes no file"),
        ({"test_patch": "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"}, "it names '../x', which is outside of the"),
    ],
)
def test_instances_of_another_shape_are_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=f"args.path=.*swe.jsonl': .*{message}"):
        SweJsonlTaskset(write(tmp_path, {**INSTANCE, **change}), image="x")


def test_what_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"args\.path=.*it holds instance acme__shop-1 twice"):
        SweJsonlTaskset(write(tmp_path, INSTANCE, INSTANCE), image="x")
    with pytest.raises(ConfigError, match=r"args\.image='': instance acme__shop-1 names no image"):
        SweJsonlTaskset(write(tmp_path, INSTANCE))
    with pytest.raises(ConfigError, match=r"args\.repositories=.*name a folder with a folder an instance"):
        SweJsonlTaskset(write(tmp_path, INSTANCE), repositories=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("created_at", "date"),
    [
        ("2022-01-19T17:07:16Z", "2022-01-19T17:07:16+00:00"),
        ("2022-01-19", "2022-01-19T00:00:00"),
        (1642612036, "2022-01-19T17:07:16+00:00"),
        (1642612036000, "2022-01-19T17:07:16+00:00"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_task_knows_its_date(tmp_path, created_at, date):
    taskset = SweJsonlTaskset(write(tmp_path, {**INSTANCE, "created_at": created_at}), image="x", evaluation_share=0.0)
    assert taskset.task(Split.TRAIN, 0).date == date


def test_a_date_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match="created_at='last summer' is no date"):
        SweJsonlTaskset(write(tmp_path, {**INSTANCE, "created_at": "last summer"}), image="x")
