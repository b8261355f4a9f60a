"""A small run of the coding env to its end, as README has it: every part is real, and the monitor looks at everything.

The model has random weights and a little reading behind it: it calls no tool, and earns nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from composer.tracking.names import sqlite_uri
from composer.types import Group, Outcome

REPOSITORY = Path(__file__).parents[2]
OVERRIDES = [
    "mix.phases.pretrain.tokens=10240",
    "mix.codebase_tokens=1024",
    "env.max_turns=3",
    "env.max_turn_tokens=24",
    "env.prompt_dropout=0.5",
    "evaluation.no_prompt=true",
    "algorithm.group_size=2",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    done = subprocess.run(
        [sys.executable, "-m", "composer", "experiment=agent", "env=coding", "run_root=runs", *OVERRIDES],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [found] = (folder / "runs").glob("*/*/summary.json")
    return found.parent


def episodes_of(run_dir: Path, stage: str) -> list[Group]:
    if stage == "rl":
        events = map(json.loads, (run_dir / "stages" / "rl" / "ledger.jsonl").read_text().splitlines())
        return [Group.from_dict(e["data"]) for e in events if e["event"] == "group"]
    lines = (run_dir / "stages" / stage / "groups.jsonl").read_text().splitlines()
    return [Group.from_dict(json.loads(line)) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_trains_on_what_was_played(run_dir: Path) -> None:
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [m["metrics"] for m in metrics if m["stage"] == "rl" and "train/grad_norm" in m["metrics"]]
    assert len(steps) == 2 and all(m["mismatch/p90"] < 1e-3 for m in steps), "both engines agree on long prompts"
    groups = episodes_of(run_dir, "rl")
    assert len(groups) == 4 and {t.task_id for g in groups for t in g.trajectories} == {"folder/train/slug"}
    episodes = [t for g in groups for t in g.trajectories]
    assert {t.outcome for t in episodes} <= {Outcome.INVALID_CALL, Outcome.MAX_TURNS} and len(episodes) == 8
    assert all(t.reward == 0.0 and t.turns for t in episodes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_prompt_is_left_out_where_it_should_be(run_dir: Path) -> None:
    for stage in ("evaluate_before", "evaluate_after"):
        [group] = episodes_of(run_dir, stage)
        assert [t.messages[0].role for t in group.trajectories] == ["user", "user"]
        assert max(len(t.turns[0].prompt_ids) for t in group.trajectories) < 300
    prompts = {g.id: {t.messages[0].role for t in g.trajectories} for g in episodes_of(run_dir, "rl")}
    assert all(len(roles) == 1 for roles in prompts.values()), "a group has it or has it not"
    assert {role for roles in prompts.values() for role in roles} == {"system", "user"}
    told = [t for g in episodes_of(run_dir, "rl") for t in g.trajectories if t.messages[0].role == "system"]
    assert min(len(t.turns[0].prompt_ids) for t in told) > 1000, "all tools with their schemas"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_monitor_is_in_the_record(run_dir: Path) -> None:
    client = MlflowClient(sqlite_uri(run_dir.parents[1] / "mlflow.db"))
    [experiment] = [e for e in client.search_experiments() if e.name == "composer"]
    runs: dict[str, Run] = {str(r.info.run_name): r for r in client.search_runs([experiment.experiment_id])}
    for stage, num in (("evaluate_before", 2), ("rl", 4), ("evaluate_after", 2)):
        found = runs[stage].data.metrics
        assert (found["monitor/episodes"], found["monitor/failed"]) == (num, 0), "all of the newest step's"
        # Turn after turn without a call that can be read: that alone, and nothing follows from it.
        assert found["monitor/found_share"] == found["monitor/kind/dodging"] == found["monitor/effect/flag"]
        assert not any(found[f"monitor/effect/{effect}"] for effect in ("penalty", "zero", "quarantine"))
        names = {a.path for a in client.list_artifacts(runs[stage].info.run_id, "monitor")}
        assert names == {"monitor/monitor.json"}
