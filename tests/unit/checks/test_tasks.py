"""Whether an env's tasks are enough, and whether somebody plays them where the mix learns from that."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer.cli import main
from composer.compose import compose
from composer.errors import PlanError
from composer.plan import make_plan

ENVS = ("coding", "coding_online", "mini_swe_agent", "openai_sdk", "openai_agents", "anthropic_sdk")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Ten tasks for training, three for evaluation."""
    for number in range(13):
        folder = tmp_path / "tasks" / f"task-{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "request.md").write_text("Do it.\n")
        (folder / "tests" / "test_it.py").write_text("def test_it():\n    assert False\n")
        (folder / "task.yaml").write_text(f"split: {'train' if number < 10 else 'evaluation'}\n")
    return tmp_path / "tasks"


@pytest.mark.parametrize("env", ENVS)
def test_the_first_try_is_answered_with_a_command_that_works(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"env={env}", "seed=3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"composer: env='{env}': nobody plays its tasks, and mix.phases.sft learns")
    assert error.count("\n") == 1
    command = error.partition("`")[2].partition("`")[0].split()
    assert command == ["composer", "experiment=agent", f"env={env}", "seed=3"]
    assert main(["plan", *command[1:]]) == 0, capsys.readouterr().err
    assert f"tiny_moe-text-{env}-" in capsys.readouterr().out


def test_an_experiment_that_was_chosen_is_kept() -> None:
    with pytest.raises(PlanError, match=r"sessions: choose a mix without such a phase, such as mix=text$"):
        make_plan(compose(["experiment=quickstart", "env=coding"]), ["experiment=quickstart", "env=coding"])


def test_without_sessions_nobody_has_to_play(tasks: Path) -> None:
    make_plan(compose(["experiment=composer1", "env=coding", f"env.taskset.args.path={tasks}",
                       "evaluation.num_tasks=3", "algorithm.group_timeout_s=3600"]))  # fmt: skip


def test_too_few_tasks_are_found_before_anything_starts(tasks: Path) -> None:
    given = ["experiment=agent", f"env.taskset.args.path={tasks}"]
    make_plan(compose([*given, "evaluation.num_tasks=3", "algorithm.num_steps=400"]))
    with pytest.raises(PlanError) as error:
        make_plan(compose([*given, "evaluation.num_tasks=4"]))
    assert str(error.value) == "evaluation.num_tasks=4: folder has 3 evaluation tasks, and 4 are needed: at most 3"
    once = [*given, "env.taskset.args.epochs=1", "algorithm.groups_per_step=3", "algorithm.num_steps=7"]
    with pytest.raises(PlanError) as error:
        make_plan(compose(once))
    assert str(error.value) == (
        "algorithm.num_steps=7: folder has 10 train tasks, and 21 are needed: add tasks, or let training go through "
        "them 3 times (env.taskset.args.epochs=3)"
    )
    make_plan(compose([*once, "env.taskset.args.epochs=3"]))


def test_a_split_without_any_task_says_why(tasks: Path) -> None:
    for number in range(10, 13):
        (tasks / f"task-{number}" / "task.yaml").write_text("split: train\n")
    with pytest.raises(PlanError, match=r"folder has no evaluation tasks, since all 13 are in the other split: change"):
        make_plan(compose(["experiment=agent", f"env.taskset.args.path={tasks}"]))
    with pytest.raises(PlanError, match=r"give env.taskset.args.path one that `composer autoinstall` made"):
        make_plan(compose(["experiment=agent", "env=installed"]))
