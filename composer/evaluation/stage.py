"""The evaluation stage: the same unseen tasks before and after RL, several episodes each.

Finished tasks are appended to `groups.jsonl` at once, so an interrupted evaluation continues with those missing, and
these with what their episodes have left on disk.
A task that lost an episode to the infrastructure is run once more; if too many stay lost, the evaluation is not done.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from composer.errors import ComposerError, GeneratorError, ResumeError
from composer.evaluation.metrics import EvaluationMetrics, evaluate_groups, value
from composer.rollout.checkpoint import Keeping
from composer.schema import EvaluationConfig
from composer.types import Group, Outcome, Split

_GROUPS = "groups.jsonl"
MAX_LOST_SHARE = 0.02
"""Episodes that may stay lost: beyond it, the numbers of two evaluations could not be compared."""


class Rollouts(Protocol):
    """Where episodes run."""

    async def run_group(
        self, split: Split, index: int, group_id: str, size: int, temperature: float, keeping: Keeping
    ) -> Group:
        """Run `size` episodes of a task. Raises ComposerError when the worker itself failed."""
        ...


async def evaluate(
    evaluation: EvaluationConfig,
    rollouts: Rollouts,
    folder: Path,
    progress: Callable[[int, Group], None],
    warn: Callable[[str], None],
    keeping: Keeping = Keeping(),  # noqa: B008 - frozen
) -> tuple[EvaluationMetrics, list[Group]]:
    """Run the evaluation, or what is left of it.

    Args:
        evaluation: tasks, episodes a task, temperature.
        rollouts: where episodes run.
        folder: keeps `groups.jsonl`.
        progress: called with the number of finished tasks and the newest group.
        warn: tells the user one sentence.
        keeping: what episodes leave on disk until their task is finished; of this evaluation alone.

    Returns:
        The metrics and the groups, in task order.

    Raises:
        GeneratorError: not finished within `evaluation.timeout_s`, or too many episodes were lost.
        ResumeError: the finished tasks of an interrupted evaluation cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = {g.id: g for g in read_groups(folder)}
    keeping.sweep(going_on={_group_id(i) for i in range(evaluation.num_tasks)} - groups.keys())
    lossy: dict[str, Group] = {}
    cause = ""

    with (folder / _GROUPS).open("a", encoding="utf-8") as file:

        async def one(index: int) -> None:
            nonlocal cause
            try:
                group = await rollouts.run_group(
                    Split.EVALUATION,
                    index,
                    _group_id(index),
                    evaluation.samples_per_task,
                    evaluation.temperature,
                    keeping,
                )
            except ComposerError as e:
                cause = str(e)
                return
            lost = [t for t in group.trajectories if t.outcome is Outcome.INFRASTRUCTURE_ERROR]
            if lost:
                lossy[group.id], cause = group, lost[0].error
                return
            file.write(json.dumps(group.to_dict(), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
            keeping.forget(group.id)
            groups[group.id] = group
            progress(len(groups), group)

        try:
            async with asyncio.timeout(evaluation.timeout_s):
                for attempt in range(2):
                    missing = [i for i in range(evaluation.num_tasks) if _group_id(i) not in groups]
                    if attempt and missing:
                        warn(f"{len(missing)} evaluation tasks lost episodes and are run once more: {cause}")
                    async with asyncio.TaskGroup() as tasks:
                        for index in missing:
                            tasks.create_task(one(index))
        except TimeoutError:
            raise GeneratorError(
                f"the evaluation had finished {len(groups)} of {evaluation.num_tasks} tasks after "
                f"evaluation.timeout_s={evaluation.timeout_s:g}; raise it and resume, finished tasks are kept"
            ) from None
    groups = lossy | groups
    ordered = [groups[_group_id(i)] for i in range(evaluation.num_tasks) if _group_id(i) in groups]
    asked = evaluation.num_tasks * evaluation.samples_per_task
    lost_episodes = asked - sum(value(t) is not None for g in ordered for t in g.trajectories)
    if lost_episodes > MAX_LOST_SHARE * asked:
        raise GeneratorError(
            f"{lost_episodes} of the evaluation's {asked} episodes were lost, the last one because: {cause}. "
            "Mend that and resume; what was finished is kept"
        )
    keeping.sweep()
    return evaluate_groups(ordered, evaluation.samples_per_task), ordered


def _group_id(index: int) -> str:
    return f"e{index}"


def read_groups(folder: Path) -> list[Group]:
    """The finished tasks of an evaluation; a half-written last line is dropped.

    Raises:
        ResumeError: the file is damaged.
    """
    path = folder / _GROUPS
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8", errors="replace")
    complete = whole[: whole.rfind("\n") + 1]
    if complete != whole:
        path.write_text(complete, encoding="utf-8")
    try:
        return [Group.from_dict(json.loads(line)) for line in complete.splitlines()]
    except (ValueError, KeyError, TypeError) as e:
        raise ResumeError(f"{path} is damaged ({e!r}); delete it to run this evaluation again") from e
