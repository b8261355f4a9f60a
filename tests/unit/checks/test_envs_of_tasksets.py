"""The env files of tasksets that read what a user names: without it, one plain error."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer.cli import main
from composer.compose import compose
from composer.errors import PlanError
from composer.plan import make_plan

ENVS = ("humaneval", "codeio", "feature_deletion", "bug_injection", "swe_jsonl")


@pytest.mark.parametrize("env", ENVS)
def test_without_a_path_the_plan_says_what_to_name(env: str) -> None:
    config = compose(["experiment=agent", f"env={env}"])
    with pytest.raises(PlanError, match=r"has no tasks yet: give env\.taskset\.args\.path "):
        make_plan(config)


@pytest.mark.parametrize("env", ENVS)
def test_a_path_that_is_not_there_is_one_plain_error(env: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = f"env.taskset.args.path={tmp_path}/none"
    assert main(["plan", "experiment=agent", f"env={env}", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"composer: {path.partition('=')[0]}=") and len(err.strip().splitlines()) == 1
