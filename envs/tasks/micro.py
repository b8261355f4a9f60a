"""Taskset `micro`: a two-line function uses the wrong operator, and the verb in its name tells the right one.

Small enough for a model of a few million parameters, plain enough for a person: `scale_price` must multiply, but
`main.py` says `return a - b`. Right and wrong operators are balanced over the indices, so no constant answer wins, and
evaluation uses nouns that training never shows, so the pools cannot share a task.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from itertools import product

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task, ToolCall

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
VERBS: dict[str, tuple[str, ...]] = {
    "+": ("add", "join", "plus"),
    "-": ("sub", "take", "minus"),
    "*": ("mul", "times", "scale"),
    "//": ("share", "split", "div"),
    "%": ("mod", "rest", "wrap"),
}
_TRAIN_NOUNS = """
price stock score level count speed width height offset index weight limit size rate time cost page line block token
byte user item node edge depth length value point frame key name path port host state event field group queue angle
batch cache chunk debt fee gain heap image job layer margin month order panel radius range ratio row seat shift signal
slot step tax total unit volume week year
"""
_EVALUATION_NOUNS = "color date file error code mode type data flag text budget credit energy money number salary"
NOUNS = {Split.TRAIN: tuple(_TRAIN_NOUNS.split()), Split.EVALUATION: tuple(_EVALUATION_NOUNS.split())}
"""No noun is in both pools, so no task is."""

# Only pairs (a, b) with five different results: any one case tells all the operators apart.
CASES = tuple(
    (a, b)
    for a, b in product((-17, -7, 7, 9, 20, 23, 38), (3, 4, 5, 6))
    if len({apply(a, b) for apply in OPERATORS.values()}) == len(OPERATORS)
)
CASES_PER_TASK = 3
# Small numbers first, positive ones before others: where operators agree.
WEAK_CASES = sorted(
    product(range(-4, 5), (-4, -3, -2, -1, 1, 2, 3, 4)), key=lambda case: (min(case) < 1, abs(case[0]) + abs(case[1]))
)
LOOKS = {"read": 0.6, "list": 0.1, "list_and_read": 0.1, "grep": 0.1, "cat": 0.1}
"""How the expert gets to see `main.py`, and in which share of its sessions."""


class MicroTaskset:
    r"""Endless tasks `<verb>_<noun>`: the same index gives the same task for ever.

    Indices walk through all combinations of right operator, wrong operator, verb and noun before a noun comes again
    with a number behind it (`add_price2`), so no two indices and no two splits share a repository.

    Example:
        >>> task = MicroTaskset().task(Split.TRAIN, 2)
        >>> task.request
        'scale_row fails its tests in main.py'
        >>> task.files["main.py"]
        b'def scale_row(a, b):\n    return a + b\n'
    """

    name = "micro"

    def __init__(
        self, verbs_per_operator: int = 3, expert_accuracy: float = 0.5, seed: int = 0, varied: bool = True
    ) -> None:
        """Choose the difficulty and how good the scripted expert is.

        Args:
            verbs_per_operator: how many verbs stand for each of the five operators, 1 to 3.
            expert_accuracy: share of the expert's sessions that repair the function, 0 to 1.
            seed: changes which noun goes with which index.
            varied: the expert looks at the repository in all the ways of `LOOKS`; otherwise it only reads `main.py`,
                and needs no tools but `read_file`, `search_replace` and `finish`.

        Raises:
            ConfigError: a value is out of range.
        """
        if not 1 <= verbs_per_operator <= 3:
            raise ConfigError("env.taskset.args.verbs_per_operator", verbs_per_operator, "must be 1, 2 or 3")
        if not 0.0 <= expert_accuracy <= 1.0:
            raise ConfigError("env.taskset.args.expert_accuracy", expert_accuracy, "must be between 0 and 1")
        self.verbs_per_operator = verbs_per_operator
        self.expert_accuracy = expert_accuracy
        self.seed = seed
        self.varied = varied

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` of a split.

        Raises:
            IndexError: the index is negative.
        """
        if index < 0:
            raise IndexError(f"task index must be >= 0, but is {index} instead")
        operators, num_verbs, nouns = list(OPERATORS), self.verbs_per_operator, NOUNS[split]
        # Innermost the right operator, then the wrong one: every 20 tasks in a row hold each pair exactly once.
        right = operators[index % 5]
        wrong = [o for o in operators if o != right][index // 5 % 4]
        # (4q + w) + q + r runs through every verb as q grows (5q mod n does, n <= 3), and mixes them in between.
        cycle, verb_number = index // 20, (index // 5 + index // 20 + index % 5) % num_verbs
        verb = VERBS[right][verb_number]
        # Each (right, wrong, verb) meets the nouns in an order of its own.
        position = cycle // num_verbs
        order = list(nouns)
        random.Random(f"{self.seed}/{split}/{right}/{wrong}/{verb}").shuffle(order)
        noun, lap = order[position % len(order)], position // len(order)
        function = f"{verb}_{noun}{lap + 1 if lap else ''}"
        cases = random.Random(f"{self.seed}/{split}/{index}/cases").sample(CASES, CASES_PER_TASK)
        return Task(
            id=f"{self.name}/{split}/{index}",
            request=f"{function} fails its tests in main.py",
            files={
                "main.py": _function_source(function, wrong).encode(),
                "test_main.py": _visible_test(function, right, wrong).encode(),
                "README.md": f"# {function}\n\nOne function of two numbers. `pytest` runs its test.\n".encode(),
            },
            hidden_tests={"test_hidden.py": _hidden_test(function, right, cases).encode()},
            metadata={
                "function": function,
                "verb": verb,
                "noun": noun,
                "right_operator": right,
                "wrong_operator": wrong,
            },
        )

    def reference(self, task: Task) -> dict[str, bytes]:
        """The files of a right solution.

        Raises:
            TaskError: the task is not of this taskset.
        """
        function, right, _ = self._parts(task)
        return {**task.files, "main.py": _function_source(function, right).encode()}

    def expert(self, task: Task, seed: int) -> list[list[ToolCall]]:
        """Look, replace the expression, finish; right in `expert_accuracy` of the seeds.

        The expert errs in two ways that have nothing to do with each other and are equally frequent: it takes a wrong
        operator (never the one that is there already), or it names the old text without its blanks, which is not in
        the file.

        Raises:
            TaskError: the task is not of this taskset.
        """
        function, right, wrong = self._parts(task)
        verb = function.partition("_")[0]
        dice = random.Random(f"{self.seed}/{task.id}/{seed}/expert")
        care = math.sqrt(self.expert_accuracy)  # right in both ways: care x care
        choice, old = right, f"return a {wrong} b"
        if dice.random() >= care:
            choice = dice.choice([o for o in OPERATORS if o not in (right, wrong)])
        if dice.random() >= care:
            old = f"return a{wrong}b"
        look = dice.choices(list(LOOKS), list(LOOKS.values()))[0] if self.varied else "read"
        edit = {"path": "main.py", "old_text": old, "new_text": f"return a {choice} b"}
        return [*_look(look, verb), [ToolCall("search_replace", edit)], [ToolCall("finish", {})]]

    def _parts(self, task: Task) -> tuple[str, str, str]:
        if not task.id.startswith(f"{self.name}/"):
            raise TaskError(f"Task {task.id} is not of taskset {self.name}: take its expert from its own taskset.")
        return task.metadata["function"], task.metadata["right_operator"], task.metadata["wrong_operator"]


def _look(way: str, verb: str) -> list[list[ToolCall]]:
    """Turns after which `main.py` has been seen, in a way of `LOOKS`."""
    read, folder = ToolCall("read_file", {"path": "main.py"}), ToolCall("list_dir", {"path": "."})
    return {
        "read": [[read]],
        "list": [[folder], [read]],
        "list_and_read": [[folder, read]],
        "grep": [[ToolCall("grep", {"pattern": f"def {verb}"})], [read]],
        "cat": [[ToolCall("shell", {"command": "cat main.py"})]],
    }[way]


def _function_source(function: str, symbol: str) -> str:
    return f"def {function}(a, b):\n    return a {symbol} b\n"


def _visible_test(function: str, right: str, wrong: str) -> str:
    """One case that the given code fails, but that some other wrong operator passes too."""
    for a, b in WEAK_CASES:
        results = {symbol: apply(a, b) for symbol, apply in OPERATORS.items()}
        passing = [symbol for symbol in results if results[symbol] == results[right]]
        if wrong not in passing and len(passing) > 1:
            check = f"    assert {function}({a}, {b}) == {results[right]}\n"
            return f"from main import {function}\n\n\ndef test_{function}():\n{check}"
    raise AssertionError(f"no weak case tells {right} from {wrong}")


def _hidden_test(function: str, right: str, cases: list[tuple[int, int]]) -> str:
    # JSON has one kind of number; `True == 1` and `1.0 == 1` hold in Python.
    lines = [
        "from composer_solution import call",
        "",
        "",
        "def check(a, b, expected):",
        f'    result = call("main.{function}", a, b)',
        "    assert type(result) is int",
        "    assert result == expected",
    ]
    for number, (a, b) in enumerate(cases, start=1):
        lines += ["", "", f"def test_case_{number}():", f"    check({a}, {b}, {OPERATORS[right](a, b)})"]
    return "\n".join(lines) + "\n"
