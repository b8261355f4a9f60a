"""The micro taskset: pools that cannot mix, answers that cannot be guessed, tests that decide."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from itertools import product

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task, ToolCall
from envs.tasks.micro import LOOKS, MicroTaskset

OPERATORS = ["+", "-", "*", "//", "%"]
TASKSET = MicroTaskset()
EVALUATION = [TASKSET.task(Split.EVALUATION, i) for i in range(64)]


def source(task: Task, operator: str) -> str:
    return task.files["main.py"].decode().replace(f"a {task.metadata['wrong_operator']} b", f"a {operator} b")


def run_tests(main: str, test: bytes) -> bool:
    """An independent judge: execute the module, then every test function."""
    module: dict = {}
    exec(main, module)
    # The hidden test calls what another process holds, and gets the answer as JSON.
    module["call"] = lambda name, *args: json.loads(json.dumps(module[name.removeprefix("main.")](*args)))
    body = "\n".join(line for line in test.decode().splitlines() if not line.startswith("from "))
    exec(body, module)
    try:
        for name in [n for n in module if n.startswith("test_")]:
            module[name]()
    except AssertionError:
        return False
    return True


def test_a_task_in_full():
    task = TASKSET.task(Split.TRAIN, 2)
    assert task.id == "micro/train/2"
    assert task.request == "scale_row fails its tests in main.py"
    assert task.files["main.py"] == b"def scale_row(a, b):\n    return a + b\n"
    assert sorted(task.files) == ["README.md", "main.py", "test_main.py"]
    assert TASKSET.reference(task)["main.py"] == b"def scale_row(a, b):\n    return a * b\n"
    assert task == MicroTaskset().task(Split.TRAIN, 2)


@pytest.mark.parametrize("split", list(Split))
def test_the_hidden_tests_pass_for_the_right_operator_only(split):
    for i in range(300):
        task = TASKSET.task(split, i)
        passing = [o for o in OPERATORS if run_tests(source(task, o), task.hidden_tests["test_hidden.py"])]
        assert passing == [task.metadata["right_operator"]], task.id


def test_the_visible_test_fails_on_the_base_state_and_is_weak():
    for task in EVALUATION:
        passing = [o for o in OPERATORS if run_tests(source(task, o), task.files["test_main.py"])]
        assert task.metadata["right_operator"] in passing and task.metadata["wrong_operator"] not in passing
        assert len(passing) > 1, "another operator passes what the model can see"


def test_hidden_tests_are_not_fooled_by_an_object_that_equals_everything():
    task = EVALUATION[0]
    trick = "class Any(int):\n    def __eq__(self, other): return True\n"
    main = trick + task.files["main.py"].decode().split("\n")[0] + "\n    return Any()\n"
    assert not run_tests(main, task.hidden_tests["test_hidden.py"])


def test_the_best_constant_answer_gets_at_most_a_quarter_of_the_evaluation():
    right = Counter(t.metadata["right_operator"] for t in EVALUATION)
    assert right == {"+": 13, "-": 13, "*": 13, "//": 13, "%": 12}
    assert max(right.values()) / 64 <= 0.25


def test_the_given_operator_does_not_tell_the_right_one():
    pairs = Counter((t.metadata["wrong_operator"], t.metadata["right_operator"]) for t in EVALUATION)
    best = sum(max(pairs[w, r] for r in OPERATORS) for w in OPERATORS)
    assert best / 64 <= 0.3, "the best answer that looks at the given operator alone"
    first_60 = Counter((t.metadata["wrong_operator"], t.metadata["right_operator"]) for t in EVALUATION[:60])
    assert set(first_60.values()) == {3} and len(first_60) == 20


def test_every_operator_needs_all_its_verbs():
    verbs = Counter(t.metadata["verb"] for t in EVALUATION[:60])
    assert len(verbs) == 15 and set(verbs.values()) == {4}


@pytest.mark.parametrize(("verbs", "first_repetition"), [(3, 60 * 70), (2, 40 * 70), (1, 20 * 70)])
def test_no_two_indices_share_a_repository(verbs, first_repetition):
    taskset = MicroTaskset(verbs_per_operator=verbs)
    tasks = [taskset.task(Split.TRAIN, i) for i in range(first_repetition + 100)]
    assert len({t.files["main.py"] for t in tasks}) == len(tasks)
    plain = [t for t in tasks if not t.metadata["function"][-1].isdigit()]
    assert len(plain) == first_repetition, "nouns get numbers only when all combinations are used up"


def test_train_and_evaluation_never_share_a_task():
    # 10,000 of each: a few laps through all combinations, numbered nouns included.
    train, evaluation = ({TASKSET.task(s, i).metadata["function"] for i in range(10_000)} for s in Split)
    assert not train & evaluation
    nouns = [{name.rstrip("0123456789").split("_")[1] for name in names} for names in (train, evaluation)]
    assert (len(nouns[0]), len(nouns[1])) == (70, 16) and not nouns[0] & nouns[1]


def test_seeds_shuffle_nouns_and_keep_the_balance():
    other = [MicroTaskset(seed=1).task(Split.EVALUATION, i) for i in range(64)]
    assert [t.request for t in other] != [t.request for t in EVALUATION]
    assert [t.metadata["right_operator"] for t in other] == [t.metadata["right_operator"] for t in EVALUATION]


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_the_expert_is_right_as_often_as_told_and_errs_in_two_independent_ways(accuracy):
    taskset = MicroTaskset(expert_accuracy=accuracy)
    solved, wrong, absent = 0, Counter(), 0
    for i, seed in product(range(300), range(5)):
        task = taskset.task(Split.TRAIN, i)
        *_, [edit], [finish] = taskset.expert(task, seed)
        assert (finish.name, finish.arguments) == ("finish", {})
        assert edit.name == "search_replace" and edit.arguments["path"] == "main.py"
        old, new = edit.arguments["old_text"], edit.arguments["new_text"]
        operator, main = new.split()[2], task.files["main.py"].decode()
        assert operator != task.metadata["wrong_operator"], "that is there already"
        assert main.count(old) in (0, 1)
        if operator != task.metadata["right_operator"]:
            wrong[operator] += 1
        elif old in main:
            solved += 1
            assert main.replace(old, new).encode() == taskset.reference(task)["main.py"]
        absent += old not in main
        ast.parse(f"def f(a, b):\n    {new}")
    # 1,500 draws: four standard deviations are 0.052 at most.
    assert abs(solved / 1500 - accuracy) < 0.055
    each = 1 - math.sqrt(accuracy)
    assert abs(wrong.total() / 1500 - each) < 0.055
    assert abs(absent / 1500 - each) < 0.055
    # Each wrong operator as often as the others, within four standard deviations of at most 16.
    assert all(abs(wrong[o] - wrong.total() / 5) < 64 for o in OPERATORS if wrong)
    task = taskset.task(Split.TRAIN, 0)
    assert taskset.expert(task, 0) == taskset.expert(task, 0)


def test_the_expert_has_seen_the_file_before_it_edits_and_looks_in_varied_ways():
    read, folder = ToolCall("read_file", {"path": "main.py"}), ToolCall("list_dir", {"path": "."})
    ways = Counter()
    for i, seed in product(range(300), range(5)):
        task = TASKSET.task(Split.TRAIN, i)
        looks = TASKSET.expert(task, seed)[:-2]
        grep = ToolCall("grep", {"pattern": f"def {task.metadata['verb']}"})
        known = {
            "read": [[read]],
            "list": [[folder], [read]],
            "list_and_read": [[folder, read]],
            "grep": [[grep], [read]],
            "cat": [[ToolCall("shell", {"command": "cat main.py"})]],
        }
        [way] = [name for name, turns in known.items() if turns == looks]
        ways[way] += 1
    # 1,500 draws: four standard deviations are 0.051 at most.
    assert all(abs(ways[way] / 1500 - share) < 0.051 for way, share in LOOKS.items())
    assert ways.total() == 1500 and sum(LOOKS.values()) == pytest.approx(1.0)
    plain = MicroTaskset(varied=False)
    assert all(plain.expert(plain.task(Split.TRAIN, i), 0)[:-2] == [[read]] for i in range(50))


def test_wrong_use_is_told():
    with pytest.raises(ConfigError, match="verbs_per_operator=4: must be 1, 2 or 3"):
        MicroTaskset(verbs_per_operator=4)
    with pytest.raises(ConfigError, match="expert_accuracy"):
        MicroTaskset(expert_accuracy=1.5)
    with pytest.raises(IndexError, match="-1"):
        TASKSET.task(Split.TRAIN, -1)
    with pytest.raises(TaskError, match="not of taskset micro"):
        TASKSET.expert(Task("other/train/0", "", {}, {}), 0)
