"""`composer tasks check`: is this env's taskset fit to be trained on?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from composer.contract import SandboxBackend
from composer.errors import MachineError
from composer.instantiate import instantiate
from composer.plan_table import WIDTH_IN_LOGS
from composer.rollout.episode import EnvSettings, Rubric
from composer.rollout.taskcheck import (
    CheckSettings,
    TaskCheck,
    TasksetCheck,
    Verdict,
    check_taskset,
    check_to_dict,
    render_check,
)
from composer.schema import Config
from composer.streams import say

EXIT_UNFIT = 1
ROUNDS = 5
"""How often each state of a task is graded: alike every time, or the task is flaky."""


def check_tasks(config: Config) -> int:
    """Grade the first tasks of each split (`evaluation.num_tasks`), untouched and solved, and print the verdicts.

    Returns:
        0 if all tasks are ok, else 1.

    Raises:
        ConfigError: a part of the env refuses its arguments.
        MachineError: the report cannot be written.
    """
    check = asyncio.run(_check(config))
    width = os.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_IN_LOGS
    for line in render_check(check, width):
        say(line)
    path = Path(config.run_root).expanduser().absolute() / f"tasks-{config.env.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(check_to_dict(check), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path} cannot be written ({error.strerror}): free space, or change run_root") from None
    say(f"the report: {path}")
    return 0 if check.ok else EXIT_UNFIT


async def _check(config: Config) -> TasksetCheck:
    env, plugins = config.env, config.plugins
    backend: SandboxBackend = instantiate(env.sandbox, plugins, key="env.sandbox", run_label="tasks-check")
    given = {"expert_accuracy": config.mix.sessions.expert_accuracy, "seed": config.seed}
    taskset = instantiate(env.taskset, plugins, key="env.taskset", **given)
    graders = {name: instantiate(t, plugins, key=f"env.graders.{name}") for name, t in env.graders.items()}
    settings = CheckSettings(
        num_tasks=config.evaluation.num_tasks,
        rounds=ROUNDS,
        grading_timeout_s=env.episode_timeout_s,
        limits=EnvSettings.from_config(env, config.generator.max_model_len).limits,
    )
    total, done = settings.num_tasks * 2, 0

    def progress(task: TaskCheck) -> None:
        nonlocal done
        done += 1
        if task.verdict is not Verdict.OK or done % 10 == 0:
            say(f"{done} of at most {total}: {task.id}: {task.verdict}", sys.stderr)

    try:
        return await check_taskset(taskset, Rubric(graders, env.grader_weights), backend, settings, progress=progress)
    finally:
        await backend.close()
