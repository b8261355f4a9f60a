"""Tasksets with a list of tasks: which split each belongs to, in which order they come, and which of them are used.

A task has a key of its own (a folder's name, an instance's id). A hash of the key decides its split, so tasks that are
added or removed move no other one, and no seed does either.
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task, ToolCall
from envs.tasks.files import read_file

_MAX_REPORT_BYTES = 2**30


def split_of(key: str, evaluation_share: float) -> Split:
    """The split of whatever has this key.

    Args:
        key: a name that stays the same.
        evaluation_share: how much of all keys is for evaluation, 0 to 1.
    """
    return Split.EVALUATION if _number(key) < evaluation_share * 2**64 else Split.TRAIN


class FiniteTaskset(ABC):
    """What tasksets with a list of tasks have in common; a subclass makes the task of a key in `_make`.

    Ids are `<taskset>/<split>/<key>`: they stay the same when other tasks come or go.
    """

    name = ""
    has_expert = False

    def __init__(
        self,
        keys: Iterable[str],
        *,
        evaluation_share: float,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
        families: Mapping[str, str] | None = None,
        fixed: Mapping[str, Split] | None = None,
        absent: str = "",
    ) -> None:
        """Divide the keys among the splits.

        Args:
            keys: of all tasks.
            evaluation_share: how much of them is for evaluation, 0 to 1.
            seed: changes the order within a split, and nothing else.
            epochs: how often training goes through its tasks, each time in another order, before they end; 0: for ever.
            checked: a report of `composer tasks check`: only tasks that it calls ok are used; "": all.
            families: key -> what decides its split in its stead, for tasks that are much alike.
            fixed: key -> the split that somebody chose for it.
            absent: what to give before there can be tasks; said when one is asked for. "": nothing is missing.

        Raises:
            ConfigError: a value is out of range, there is no task, or the report cannot be read.
        """
        if not 0.0 <= evaluation_share <= 1.0:
            raise ConfigError("env.taskset.args.evaluation_share", evaluation_share, "must be between 0 and 1")
        if epochs < 0:
            raise ConfigError("env.taskset.args.epochs", epochs, "must be at least 1, or 0 for no end")
        self._absent = absent
        families, fixed = families or {}, fixed or {}
        self._splits = {
            key: fixed.get(key) or split_of(families.get(key, key), evaluation_share) for key in sorted(set(keys))
        }
        if checked and not absent:
            accepted = _accepted(checked)
            self._splits = {k: split for k, split in self._splits.items() if self._id(k, split) in accepted}
            if not self._splits:
                raise ConfigError("env.taskset.args.checked", checked, f"it calls no task of {self.name} ok")
        self._seed, self._epochs = seed, epochs
        self._order = functools.lru_cache(maxsize=4)(self._make_order)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` of a split.

        Raises:
            IndexError: there is no such task.
            TaskError: the task cannot be made, the split has no task at all, or what has tasks was not named.
        """
        if self._absent:
            raise TaskError(f"{self.name} has no tasks yet: {self._absent}.")
        first = self._order(split, 0)
        if not first and index == 0:
            raise TaskError(
                f"{self.name} has no {split} tasks, since all {len(self._splits)} are in the other split: "
                "change env.taskset.args.evaluation_share."
            )
        most = self.num_tasks(split)
        if not first or index < 0 or (most is not None and index >= most):
            raise IndexError(f"{self.name} has {most or 0} {split} tasks, and none at index {index}")
        epoch, place = divmod(index, len(first))
        return self._make(self._order(split, epoch)[place], split)

    def num_tasks(self, split: Split, *, distinct: bool = False) -> int | None:
        """How many tasks a split has.

        Args:
            split: which.
            distinct: each once, however often training goes through them.

        Returns:
            Their number; None where training goes through them for ever.
        """
        num = len(self._order(split, 0))
        if split is Split.EVALUATION or distinct or not num:
            return num
        return num * self._epochs or None

    def expert(self, task: Task, seed: int) -> list[ToolCall]:
        """Nobody plays these tasks.

        Raises:
            TaskError: always.
        """
        raise TaskError(f"Taskset {self.name} has no expert to play task {task.id}: take sessions from another one.")

    def keys(self, split: Split) -> list[str]:
        """The keys of a split's tasks, by index; of one that goes on for ever, the first time through."""
        epochs = 1 if split is Split.EVALUATION else max(1, self._epochs)
        return [key for epoch in range(epochs) for key in self._order(split, epoch)]

    def _make_order(self, split: Split, epoch: int) -> list[str]:
        """The keys of a split as they come in an epoch."""
        keys = (k for k, s in self._splits.items() if s is split)
        return sorted(keys, key=lambda k: _number(f"{self._seed}/{epoch}/{k}"))

    @abstractmethod
    def _make(self, key: str, split: Split) -> Task:
        """The task of a key.

        Raises:
            TaskError: it cannot be made.
        """

    def _id(self, key: str, split: Split) -> str:
        return f"{self.name}/{split}/{key}"

    def _key(self, task: Task) -> str:
        """The key of one of our tasks.

        Raises:
            TaskError: it is not of this taskset.
        """
        for split in Split:
            key = task.id.removeprefix(self._id("", split))
            if key != task.id and self._splits.get(key) is split:
                return key
        raise TaskError(f"Task {task.id} is not of taskset {self.name}: take its reference from its own taskset.")


def _accepted(report: str) -> set[str]:
    """The ids that a report of `composer tasks check` calls ok."""
    try:
        tasks = json.loads(read_file(Path(report), _MAX_REPORT_BYTES))["tasks"]
        return {task["id"] for task in tasks if task["verdict"] == "ok"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            "env.taskset.args.checked", report, f"this is no report of `composer tasks check` ({error!r:.120})"
        ) from None


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:8], "big")
