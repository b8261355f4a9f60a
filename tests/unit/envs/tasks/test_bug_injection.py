"""Faults in a repository: one a task, where tests look, and the same ones for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task
from envs.grading.command_grader import Recipe
from envs.tasks.bug_injection import BugInjectionTaskset

sys.path.insert(0, str(Path(__file__).parent))
from small_repository import FILES, write_repository  # noqa: E402


def all_tasks(taskset) -> dict[str, Task]:
    tasks = [taskset.task(split, i) for split in Split for i in range(len(taskset.keys(split)))]
    return {task.id: task for task in tasks}


def test_every_task_is_one_fault_in_a_function_that_tests_name(tmp_path):
    taskset = BugInjectionTaskset(str(write_repository(tmp_path)), max_per_function=100)
    tasks = all_tasks(taskset)
    functions = {(t.metadata["file"], t.metadata["function"]) for t in tasks.values()}
    assert functions == {
        ("shop/money.py", "total"),
        ("shop/money.py", "cents"),
        ("shop/cart.py", "Cart.add"),
        ("shop/cart.py", "Cart.sum"),
    }
    original = {path: content.encode() for path, content in FILES.items()}
    for task in tasks.values():
        changed = [path for path in original if task.files[path] != original[path]]
        assert changed == [task.metadata["file"]] and task.files.keys() == original.keys()
        assert taskset.reference(task) == original
        assert set(task.hidden_tests) == {p for p in original if p.startswith("tests/")}
        assert task.metadata["function"] in task.request and "\n" not in task.request
    assert len({task.files[task.metadata["file"]] for task in tasks.values()}) == len(tasks)


def test_the_faults_of_a_function_by_hand(tmp_path):
    taskset = BugInjectionTaskset(str(write_repository(tmp_path)), evaluation_share=0.0)
    tasks = [t for t in all_tasks(taskset).values() if t.metadata["function"] == "total"]
    bodies = {
        t.id.rpartition("::")[2]: t.files["shop/money.py"].decode().split("# Never negative.\n")[1].split("\n\n")[0]
        for t in tasks
    }
    assert bodies == {
        "operator-0": "    return sum(prices) - fee",
        "return-0": "    sum(prices) + fee",
    }
    assert {t.metadata["line"] for t in tasks} == {7}
    assert next(iter(t for t in tasks if "operator" in t.id)).id == (
        "bug_injection/train/shop/money.py::total::operator-0"
    )


def test_faults_of_one_function_are_in_one_split_and_few_if_so_wished(tmp_path):
    path = str(write_repository(tmp_path))
    taskset = BugInjectionTaskset(path, evaluation_share=0.5)
    by_split = [{key.rpartition("::")[0] for key in taskset.keys(split)} for split in Split]
    assert by_split[0] and by_split[1] and not by_split[0] & by_split[1]
    few = BugInjectionTaskset(path, max_per_function=1, evaluation_share=0.5)
    assert sum(len(few.keys(split)) for split in Split) == 4
    for split in Split:
        assert set(few.keys(split)) < set(taskset.keys(split))
    assert all_tasks(taskset) == all_tasks(BugInjectionTaskset(path, evaluation_share=0.5))
    kinds = {t.metadata["kind"] for t in all_tasks(BugInjectionTaskset(path, kinds=["return"])).values()}
    assert kinds == {"return"}


def test_tests_are_out_of_sight_if_so_wished(tmp_path):
    taskset = BugInjectionTaskset(str(write_repository(tmp_path)), visible_tests=False, evaluation_share=0.0)
    task = taskset.task(Split.TRAIN, 0)
    assert sorted(task.files) == ["README.md", "shop/__init__.py", "shop/cart.py", "shop/money.py"]
    assert len(task.hidden_tests) == 4


def test_how_all_tests_are_run(tmp_path):
    path = str(write_repository(tmp_path))
    task = BugInjectionTaskset(path, evaluation_share=0.0).task(Split.TRAIN, 0)
    command = "python3 -m pytest -p no:cacheprovider --junitxml={report} tests/test_cart.py tests/test_money.py"
    assert Recipe.of(task) == Recipe(command, report="junit") and task.image == ""
    taskset = BugInjectionTaskset(path, image="shop:1", test_command="tox -- -rA {test_files}", evaluation_share=0.0)
    task = taskset.task(Split.TRAIN, 0)
    assert Recipe.of(task) == Recipe("tox -- -rA tests/test_cart.py tests/test_money.py", report="pytest")
    assert task.image == "shop:1"


def test_what_is_refused(tmp_path):
    path = write_repository(tmp_path / "shop")
    (tmp_path / "only" / "tests").mkdir(parents=True)
    (tmp_path / "only" / "tests" / "test_a.py").write_text("def test(): pass\n")
    for options, message in (
        ({"kinds": ["typo"]}, "args.kinds='typo': must be some of operator, comparison"),
        ({"max_per_function": 0}, "args.max_per_function=0: must be at least 1"),
        ({"path": str(tmp_path / "nowhere")}, "args.path=.*name the folder of a Python repository"),
        ({"path": str(tmp_path / "only")}, "args.path=.*there is no Python file in it that is no test"),
        ({"path": str(path / "shop")}, "args.path=.*there is no test in it that pytest would find"),
    ):
        with pytest.raises(ConfigError, match=message):
            BugInjectionTaskset(**{"path": str(path), **options})
    with pytest.raises(TaskError, match="Task x/train/y is not of taskset bug_injection"):
        BugInjectionTaskset(str(path)).reference(Task("x/train/y", "", {}, {}))
    lonely = write_repository(
        tmp_path / "lonely", {"tests/test_money.py": "def test(): pass", "tests/test_cart.py": ""}
    )
    with pytest.raises(ConfigError, match="no function in it that its tests name can be mutated"):
        BugInjectionTaskset(str(lonely))
