"""A real Hydra multirun: one parent in MLflow with a child a job, and a line about each job at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

APPLICATION = """
import json, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from composer.tracking.console import write_summary
from composer.tracking.mlflow import Record


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    plain = OmegaConf.to_container(config, resolve=True)
    rate = config.algorithm.learning_rate
    with Record.open(plain, run_dir) as record:
        with record.stage("rl") as stage:
            stage.log(1, {"reward/mean": rate})
        if rate < 0:
            raise ValueError(f"algorithm.learning_rate={rate}: must be above 0")
        if rate > 1:
            raise KeyboardInterrupt
        summary = {"evaluation": {"before": {"average_at_8": 0.25}, "after": {"average_at_8": 0.25 + rate}}}
        record.results(summary)
        write_summary(run_dir, summary)


main()
"""
CONFIG = """
hydra:
  callbacks:
    sweep:
      _target_: composer.tracking.sweep.SweepCallback
  sweep:
    dir: {root}/sweeps/one
    subdir: ${{hydra:job.num}}
seed: 1
run_root: {root}
tracking: {{uri: null, experiment: composer, timeout_s: 5.0, run_name: null, system_metrics_every_s: null}}
algorithm: {{learning_rate: 0.1}}
"""


@pytest.fixture
def application(tmp_path: Path, run_dir: Path) -> Path:
    """A small Hydra application in the place of `composer`; `run_dir` puts an empty database into the run root."""
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "config.yaml").write_text(CONFIG.format(root=run_dir.parent))
    return tmp_path


def sweep(application: Path, rates: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "app.py", "--config-dir", ".", "-m", f"algorithm.learning_rate={rates}", "seed=7"]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "HOME": str(application)}
    return subprocess.run(command, cwd=application, env=environment, capture_output=True, text=True, timeout=120)


def runs_of(application: Path) -> list[Any]:
    client = MlflowClient(f"sqlite:///{application}/runs/mlflow.db")
    return list(client.search_runs([client.get_experiment_by_name("composer").experiment_id]))


def test_a_sweep_is_one_parent_with_comparable_children(application: Path) -> None:
    done = sweep(application, "0.1,0.3")
    assert done.returncode == 0, done.stderr
    runs = runs_of(application)
    (parent,) = [run for run in runs if "composer.sweep" in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert parent.info.run_name == "sweep one"
    assert {run.info.status for run in runs} == {"FINISHED"}
    compared = {
        run.data.params["algorithm.learning_rate"]: run.data.metrics["evaluation/after/average_at_8"]
        for run in children
    }
    assert compared == {"0.1": 0.35, "0.3": 0.55}
    assert {run.data.params["seed"] for run in children} == {"7"}
    stages = {run.data.tags["mlflow.parentRunId"] for run in runs if run.info.run_name == "rl"}
    assert stages == {child.info.run_id for child in children}
    assert parent.data.params["sweep.algorithm.learning_rate"] == "0.1,0.3"
    client = MlflowClient(f"sqlite:///{application}/runs/mlflow.db")
    history = client.get_metric_history(parent.info.run_id, "evaluation/after/average_at_8")
    assert [(point.step, point.value) for point in history] == [(0, 0.35), (1, 0.55)]
    table = json.loads((application / "runs/sweeps/one/tables/jobs.json").read_text())
    assert table["columns"][:4] == ["job", "algorithm.learning_rate", "seed", "status"]
    assert [row[:4] for row in table["data"]] == [[0, "0.1", "7", "FINISHED"], [1, "0.3", "7", "FINISHED"]]


def test_each_job_is_reported_when_it_ends(application: Path) -> None:
    lines = [
        line[9:] for line in sweep(application, "0.1,0.3").stdout.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)
    ]
    told = [line for line in lines if line.startswith("sweep job")]
    assert told[0] == "sweep job 0 starts: algorithm.learning_rate=0.1 seed=7"
    assert re.fullmatch(r"sweep job 0 finished after [\d.]+s: average@8 0.25 -> 0.35", told[1])
    assert told[2].startswith("sweep job 1 starts")
    assert re.fullmatch(r"sweep job 1 finished after [\d.]+s: average@8 0.25 -> 0.55", told[3])
    assert any(f"--backend-store-uri sqlite:///{application}/runs/mlflow.db" in line for line in lines)


def test_a_failed_job_is_said_at_once_and_the_others_still_run(application: Path) -> None:
    done = sweep(application, "-1,0.3")
    assert done.returncode != 0
    failure = next(line for line in done.stdout.splitlines() if "FAILED" in line)
    assert "sweep job 0 FAILED" in failure and "algorithm.learning_rate=-1: must be above 0" in failure
    assert done.stdout.index("FAILED") < done.stdout.index("sweep job 1 starts")
    assert "sweep job 1 finished" in done.stdout
    by_name = {run.info.run_name: run.info.status for run in runs_of(application) if run.info.run_name != "rl"}
    assert by_name == {"sweep one": "FAILED", "0": "FAILED", "1": "FINISHED"}


def test_a_sweep_that_is_interrupted_ends_as_killed(application: Path) -> None:
    done = sweep(application, "0.1,2.0,0.3")
    assert done.returncode != 0
    by_name = {run.info.run_name: run.info.status for run in runs_of(application) if run.info.run_name != "rl"}
    assert by_name == {"sweep one": "KILLED", "0": "FINISHED", "1": "KILLED"}
    table = json.loads((application / "runs/sweeps/one/tables/jobs.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["status"], row["algorithm.learning_rate"]) for row in rows] == [("FINISHED", "0.1"), ("KILLED", "2.0")]
    assert all(0 < row["wall_s"] < 60 for row in rows)
    [printed] = [line.split() for line in done.stdout.splitlines() if "KILLED" in line]
    assert printed[:3] == ["1", "algorithm.learning_rate=2.0", "KILLED"] and printed[-1].endswith("s")
