"""Whether there are tasks enough, and somebody who plays those that the mix learns from; runs nothing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from composer.checks.common import require, wants_sessions
from composer.errors import PlanError, TaskError
from composer.schema import Config, PhaseKind, Stage
from composer.types import Split

WITHOUT_EXPERT = "experiment=agent"
"""What makes a small run of any env (conf/experiment/agent.yaml)."""


def check_tasks(config: Config, taskset: Any, typed: Sequence[str] = ()) -> None:
    """Compare what the stages need of the env's taskset with what it says it has.

    Args:
        config: the resolved config.
        taskset: the env's; `composer.contract.Taskset` says what it may tell of itself.
        typed: overrides as the user typed them, repeated in the command that would do.

    Raises:
        PlanError: the mix learns from an expert that there is not, or a split has too few tasks.
    """
    if wants_sessions(config):
        _check_expert(config, taskset, typed)
    if config.resume is None:  # a run that goes on has had its tasks
        _check_number(config, taskset)


def _check_expert(config: Config, taskset: Any, typed: Sequence[str]) -> None:
    phase = next(n for n, p in config.mix.phases.items() if p.kind is PhaseKind.sft)
    remedy = "choose a mix without such a phase, such as mix=text"
    if not any(override.lstrip("+").startswith("experiment=") for override in typed):
        words = [word for word in typed if not word.lstrip("+").startswith("mix=")]
        remedy = f"write `{shlex.join(['composer', WITHOUT_EXPERT, *words])}`, or {remedy}"
    require(
        getattr(taskset, "has_expert", True),
        "env",
        config.env.name,
        f"nobody plays its tasks, and mix.phases.{phase} learns from a scripted expert's sessions: {remedy}",
    )


def _check_number(config: Config, taskset: Any) -> None:
    if not hasattr(taskset, "num_tasks"):
        return
    a, e, needs = config.algorithm, config.evaluation, []
    if Stage.evaluate_before in config.stages or Stage.evaluate_after in config.stages:
        needs.append((Split.EVALUATION, e.num_tasks, "evaluation.num_tasks", e.num_tasks))
    if Stage.rl in config.stages:
        played = config.mix.sessions.num_sessions if wants_sessions(config) else 0
        needs.append((Split.TRAIN, a.num_steps * a.groups_per_step + played, "algorithm.num_steps", a.num_steps))
    for split, needed, key, value in needs:
        there = taskset.num_tasks(split)
        if there is None or needed <= there:
            continue
        if not there:
            _say_why(config, taskset, split)
        remedy = f"{taskset.name} has {there} {split} tasks, and {needed} are needed: "
        if split is Split.EVALUATION:
            remedy += f"at most {there}"
        else:
            epochs = math.ceil(needed / taskset.num_tasks(split, distinct=True))
            remedy += f"add tasks, or let training go through them {epochs} times (env.taskset.args.epochs={epochs})"
        raise PlanError(key, value, remedy)


def _say_why(config: Config, taskset: Any, split: Split) -> None:
    """A split that has no tasks at all: the taskset knows why."""
    try:
        taskset.task(split, 0)
    except TaskError as error:
        raise PlanError("env.taskset", config.env.taskset._target_, str(error)) from error
    except IndexError:
        raise PlanError("env.taskset", config.env.taskset._target_, f"it has no {split} tasks: add some") from None
