"""Splits that no index and no seed decides, orders that last, and reports that choose."""

from __future__ import annotations

import json

import pytest

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset, split_of


class Letters(FiniteTaskset):
    name = "letters"

    def __init__(self, keys="abcdefgh", evaluation_share=0.2, **options):
        super().__init__(keys, evaluation_share=evaluation_share, **options)

    def _make(self, key, split):
        return Task(self._id(key, split), key, {}, {})


def requests(taskset, split):
    found = []
    while True:
        try:
            found.append(taskset.task(split, len(found)).request)
        except IndexError:
            return found


def test_a_hash_decides_the_split():
    # printf a | sha256sum: ca97…, b: 3e23…, c: 2e7d…; as shares of 2^256: 0.791, 0.243, 0.182.
    assert [split_of(key, 0.2) for key in "abc"] == [Split.TRAIN, Split.TRAIN, Split.EVALUATION]
    assert [split_of(key, 0.25) for key in "abc"] == [Split.TRAIN, Split.EVALUATION, Split.EVALUATION]
    assert {split_of(key, 0.0) for key in "abc"} == {Split.TRAIN}
    assert {split_of(key, 1.0) for key in "abc"} == {Split.EVALUATION}


def test_every_task_is_in_one_split_which_neither_seed_nor_other_tasks_change():
    few, many, other_seed = Letters("abc"), Letters("abcdefgh"), Letters("abcdefgh", seed=1)
    for split in Split:
        assert set(few.keys(split)) <= set(many.keys(split)) == set(other_seed.keys(split))
        assert requests(many, split) == many.keys(split)
    assert sorted(many.keys(Split.TRAIN) + many.keys(Split.EVALUATION)) == list("abcdefgh")
    assert many.keys(Split.TRAIN) != other_seed.keys(Split.TRAIN)
    assert Letters("hgfedcba").keys(Split.TRAIN) == many.keys(Split.TRAIN)


def test_training_goes_through_its_tasks_in_another_order_each_time_and_evaluation_once():
    keys = Letters(epochs=3).keys(Split.TRAIN)
    once = Letters().keys(Split.TRAIN)
    rounds = [keys[i : i + len(once)] for i in range(0, len(keys), len(once))]
    assert len(rounds) == 3 and rounds[0] == once
    assert all(sorted(r) == sorted(once) for r in rounds) and rounds[1] != rounds[0]
    assert Letters(epochs=3).keys(Split.EVALUATION) == Letters().keys(Split.EVALUATION)


def test_training_may_go_on_for_ever():
    endless, once, twice = Letters(epochs=0), Letters().keys(Split.TRAIN), Letters(epochs=2)
    for index in range(2 * len(once)):
        assert endless.task(Split.TRAIN, index) == twice.task(Split.TRAIN, index)
    far = [endless.task(Split.TRAIN, 1000 * len(once) + i).request for i in range(len(once))]
    assert sorted(far) == sorted(once)
    assert endless.keys(Split.TRAIN) == once
    assert requests(endless, Split.EVALUATION) == Letters().keys(Split.EVALUATION)
    assert [endless.num_tasks(split) for split in (Split.TRAIN, Split.EVALUATION)] == [None, 8 - len(once)]
    assert endless.num_tasks(Split.TRAIN, distinct=True) == len(once)
    assert twice.num_tasks(Split.TRAIN) == 2 * len(once)
    assert Letters("a", evaluation_share=1.0, epochs=0).num_tasks(Split.TRAIN) == 0


def test_families_stay_together_and_a_chosen_split_holds():
    together = Letters("ac", families={"a": "c"})
    assert sorted(together.keys(Split.EVALUATION)) == ["a", "c"]
    fixed = Letters("ac", fixed={"a": Split.EVALUATION, "c": Split.TRAIN})
    assert (fixed.keys(Split.EVALUATION), fixed.keys(Split.TRAIN)) == (["a"], ["c"])


def test_what_a_check_did_not_call_ok_is_left_out(tmp_path):
    report = tmp_path / "report.json"
    tasks = [
        {"id": "letters/train/a", "verdict": "ok"},
        {"id": "letters/train/b", "verdict": "flaky"},
        {"id": "letters/train/c", "verdict": "ok"},  # of the other split
    ]
    report.write_text(json.dumps({"tasks": tasks}))
    assert Letters(checked=str(report)).keys(Split.TRAIN) == ["a"]
    assert Letters(checked=str(report)).keys(Split.EVALUATION) == []
    with pytest.raises(ConfigError, match=r"args\.checked=.*: it calls no task of letters ok"):
        Letters("b", checked=str(report))


@pytest.mark.parametrize("content", ["", "[]", '{"tasks": [{}]}', '{"tasks": 1}', None])
def test_a_report_that_is_none_is_named(tmp_path, content):
    report = tmp_path / "report.json"
    if content is not None:
        report.write_text(content)
    with pytest.raises(ConfigError, match=r"args\.checked=.*report\.json'.*no report of `composer tasks check`"):
        Letters(checked=str(report))


def test_what_is_out_of_range_is_refused():
    for options, key in (({"evaluation_share": 1.5}, "evaluation_share"), ({"epochs": -1}, "epochs")):
        with pytest.raises(ConfigError, match=f"env.taskset.args.{key}="):
            Letters(**options)
    for index in (-1, 8):
        with pytest.raises(IndexError):
            Letters(evaluation_share=0.0).task(Split.TRAIN, index)
    with pytest.raises(
        TaskError, match=r"^letters has no evaluation tasks, since all 8 are in the other split: change"
    ):
        Letters(evaluation_share=0.0).task(Split.EVALUATION, 0)
    with pytest.raises(TaskError, match=r"Taskset letters has no expert to play task letters/train/a"):
        Letters().expert(Task("letters/train/a", "", {}, {}), 0)
    for id in ("letters/train/x", "letters/evaluation/a", "other/train/a"):
        with pytest.raises(TaskError, match=f"Task {id} is not of taskset letters"):
            Letters()._key(Task(id, "", {}, {}))
