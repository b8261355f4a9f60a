"""The record in a real MLflow on SQLite: what was logged is read back with MLflow's own client."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from composer.tracking import state as states
from composer.tracking.mlflow import Record
from composer.types import Trajectory

Config = Callable[..., dict[str, Any]]


def client_of(run_dir: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")


def runs_of(run_dir: Path) -> dict[str, Run]:
    client = client_of(run_dir)
    experiment = client.get_experiment_by_name("composer")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_a_closed_record_holds_no_file_open(make_config: Config, run_dir: Path) -> None:
    def held() -> list[str]:
        links = list(Path("/proc/self/fd").iterdir())
        return [what for link in links if (what := os.path.realpath(link)).startswith(str(run_dir.parent.resolve()))]

    with Record.open(make_config(), run_dir, warn=pytest.fail) as record:
        record.log(1, {"loss": 1.0}, stage=None)
        assert record.flush()
        assert any(Path(what).name == "mlflow.db" for what in held())
    assert held() == []
    with Record.open(make_config(), run_dir, warn=pytest.fail) as record:
        record.log(2, {"loss": 1.0}, stage=None)
        assert record.flush(), "the database can be used again"
    assert held() == []


def test_a_run_with_nested_stages(make_config: Config, run_dir: Path, trajectory: Trajectory) -> None:
    warnings: list[str] = []
    plan = run_dir / "plan.yaml"
    plan.write_text("stages: 4")
    with Record.open(make_config(), run_dir, warn=warnings.append, tags={"git_commit": "abc"}) as record:
        record.artifact(plan, "config")
        with record.stage("pretrain") as stage:
            stage.log(10, {"loss/train": 5.5, "loss/codebase": 6.0})
        with record.stage("rl") as stage:
            for step in range(1, 4):
                stage.log(step, {"mean@1": step / 4, "timing(s)/gen": 1.5, "bad": math.nan, "worse": math.inf})
            stage.trace(trajectory, step=3)
            stage.table("tasks.json", [{"task": "t1", "reward": 1.0}, {"task": "t2", "turns": 2}])
        record.results({"evaluation": {"after": {"average_at_8": 0.75}}})
        record.plots()
        assert record.flush(60)
    assert record.report is not None
    assert (record.report.num_unsent, record.report.sentence, warnings) == (0, "", [])
    client, runs = client_of(run_dir), runs_of(run_dir)
    parent = runs["first"]
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(
        ("first", "pretrain", "rl"), "FINISHED"
    )
    assert {runs[stage].data.tags["mlflow.parentRunId"] for stage in ("pretrain", "rl")} == {parent.info.run_id}
    assert parent.info.run_id == record.report.run_id
    assert parent.data.params["algorithm.learning_rate"] == "0.0003"
    assert parent.data.params["tracking.uri"] == "null"
    assert parent.data.tags["git_commit"] == "abc" and parent.data.tags["seed"] == "3"
    assert parent.data.tags["run_dir"] == str(run_dir)
    if shutil.which("git"):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        assert parent.data.tags.get("mlflow.source.git.commit", "") == commit.stdout.strip()
    assert parent.data.metrics["evaluation/after/average_at_8"] == 0.75
    rl = runs["rl"].info.run_id
    history = client.get_metric_history(rl, "mean_at_1")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert {"timing_s/gen", "bad", "worse"} < set(runs["rl"].data.metrics)
    assert math.isnan(runs["rl"].data.metrics["bad"]) and math.isnan(runs["rl"].data.metrics["worse"])
    assert runs["pretrain"].data.metrics == {"loss/train": 5.5, "loss/codebase": 6.0}
    kept = run_dir.parent / "mlartifacts/composer" / parent.info.run_id / "artifacts/config/plan.yaml"
    assert kept.read_text() == "stages: 4"
    assert [entry.path for entry in client.list_artifacts(parent.info.run_id, "plots")] == ["plots/pretrain_loss.png"]
    table = json.loads(Path(client.download_artifacts(rl, "tables/tasks.json", str(run_dir))).read_text())
    assert table == {"columns": ["task", "reward", "turns"], "data": [["t1", 1.0, None], ["t2", None, 2]]}


def test_the_trace_of_an_episode_is_read_back(make_config: Config, run_dir: Path, trajectory: Trajectory) -> None:
    with Record.open(make_config(), run_dir) as record, record.stage("rl") as stage:
        stage.trace(trajectory, step=3)
        stage.trace(trajectory, step=3)  # as after a crash between sending and noting it
        assert record.flush(60)
    rl = runs_of(run_dir)["rl"]
    traces = client_of(run_dir).search_traces(locations=[rl.info.experiment_id], run_id=rl.info.run_id)
    assert len(traces) == 1
    info, spans = traces[0].info, traces[0].data.spans
    assert info.tags["reward"] == "0.75" and info.tags["task_id"] == "micro/train/7" and info.tags["step"] == "3"
    assert info.execution_duration == 1500
    assert [(span.name, span.span_type) for span in spans] == [
        ("episode", "AGENT"),
        ("turn 1", "CHAT_MODEL"),
        ("read_file", "TOOL"),
        ("turn 2", "CHAT_MODEL"),
    ]
    episode, first, tool, second = spans
    assert (first.parent_id, tool.parent_id, second.parent_id) == (episode.span_id, first.span_id, episode.span_id)
    assert tool.inputs == {"path": "main.py"} and tool.outputs == "def f()"
    assert episode.attributes["reward"] == 0.75 and episode.attributes["reward.hidden_tests"] == 1.0
    assert first.end_time_ns - first.start_time_ns == 10**9
    assert second.inputs["messages"] == [{"role": "tool", "content": "def f()"}]


def test_many_and_long_parameters(make_config: Config, run_dir: Path) -> None:
    config = make_config()
    config["many"] = {f"p{number}": number for number in range(250)}
    config["prompt"] = "You repair code. " * 1000
    config["odd (name)@"] = {"x/../y": 1}
    config["empty"] = ""
    with Record.open(config, run_dir) as record:
        pass
    assert record.report is not None and record.report.num_refused == 0
    run = runs_of(run_dir)["first"]
    assert {run.data.params[f"many.p{number}"] for number in range(250)} == {str(number) for number in range(250)}
    assert len(run.data.params["prompt"]) == 6000 and run.data.params["prompt"].endswith("[17000 characters]")
    whole = Path(client_of(run_dir).download_artifacts(run.info.run_id, "params/prompt.txt", str(run_dir)))
    assert whole.read_text() == config["prompt"]
    assert run.data.params["empty"] == ""
    assert len(run.data.params) == 250 + 3 + len(config["tracking"]) + 3


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_runs_end_with_the_status_that_fits(
    make_config: Config, run_dir: Path, error: type[BaseException] | None, status: str
) -> None:
    def work() -> None:
        with Record.open(make_config(), run_dir) as record:
            with record.stage("pretrain"):
                pass
            with record.stage("rl"):
                record.flush(60)
                if error is not None:
                    raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    runs = runs_of(run_dir)
    assert {name: run.info.status for name, run in runs.items()} == {
        "first": status,
        "pretrain": "FINISHED",
        "rl": status,
    }
    assert all(run.info.end_time for run in runs.values())


PROGRAM = """
import json, sys, time
from composer.tracking.mlflow import Record
config, run_dir, first = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
record = Record.open(config, run_dir)
stage = record.stage("rl")
for step in range(first, first + 5):
    stage.log(step, {"reward/mean": step / 10})
record.flush(60)
for step in range(first + 5, first + 7):
    stage.log(step, {"reward/mean": step / 10})
print("ready", flush=True)
time.sleep(60)
"""


def killed_session(config: dict[str, Any], run_dir: Path, first: int) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(config), str(run_dir), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_twice_and_resumed_it_is_one_run_without_a_gap(make_config: Config, run_dir: Path) -> None:
    config = make_config()
    killed_session(config, run_dir, 0)
    first = runs_of(run_dir)
    assert {run.info.status for run in first.values()} == {"RUNNING"}
    killed_session(config, run_dir, 7)
    killed_ms = time.time() * 1000
    time.sleep(1.0)
    (run_dir / "composer.log").write_text("resumed")  # as a start does before it opens the record
    with Record.open(config, run_dir) as record:
        record.flush(60)
        between = {name: run.info.status for name, run in runs_of(run_dir).items()}
        assert killed_ms - 60_000 < runs_of(run_dir)["rl"].info.end_time <= killed_ms
        with record.stage("rl") as stage:
            stage.log(14, {"reward/mean": 1.4})
    assert between == {"first": "RUNNING", "rl": "KILLED"}
    last = runs_of(run_dir)
    assert {name: run.info.run_id for name, run in last.items()} == {n: run.info.run_id for n, run in first.items()}
    assert {run.info.status for run in last.values()} == {"FINISHED"}
    history = client_of(run_dir).get_metric_history(last["rl"].info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(step, step / 10) for step in range(15)]


@pytest.mark.parametrize("place", ["other", "another day/other", "another day/sweep/0"])
def test_the_next_run_ends_what_a_killed_one_left_running(make_config: Config, run_dir: Path, place: str) -> None:
    config = make_config()
    other = run_dir.parent / place
    other.mkdir(parents=True)
    killed_session(config, other, 0)
    with Record.open(config, run_dir) as record:
        assert record.flush(60)
        assert runs_of(run_dir)[other.name].info.status == "KILLED"
        assert runs_of(run_dir)["rl"].info.status == "KILLED"
        assert runs_of(run_dir)[run_dir.name].info.status == "RUNNING", "a live one is let alone"
    killed = states.load(other)
    assert killed is not None and {run.sent_status for run in killed.runs.values()} == {"KILLED"}


def test_a_deleted_database_is_filled_again(make_config: Config, run_dir: Path) -> None:
    with Record.open(make_config(), run_dir) as record, record.stage("rl") as stage:
        stage.log(1, {"reward/mean": 0.5})
    # Another database stands for the deleted one: MLflow keeps an engine a path for the life of a process.
    moved = make_config(uri=f"sqlite:///{run_dir.parent}/again.db")
    with Record.open(moved, run_dir) as record:
        pass
    client = MlflowClient(moved["tracking"]["uri"])
    experiment = client.get_experiment_by_name("composer")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found["rl"].data.metrics == {"reward/mean": 0.5}
    assert {run.info.status for run in found.values()} == {"FINISHED"}


def test_a_run_that_is_not_in_the_database_any_more_is_made_again(make_config: Config, run_dir: Path) -> None:
    with Record.open(make_config(), run_dir) as record, record.stage("rl") as stage:
        stage.log(1, {"reward/mean": 0.5})
    old = runs_of(run_dir)
    for run in old.values():
        client_of(run_dir).delete_run(run.info.run_id)
    with Record.open(make_config(), run_dir) as record:
        pass
    new = runs_of(run_dir)
    assert new["rl"].data.metrics == {"reward/mean": 0.5}
    assert new["first"].info.run_id != old["first"].info.run_id
    assert new["first"].data.params == old["first"].data.params


def test_three_runs_write_one_new_database_at_once(make_config: Config, run_dir: Path) -> None:
    (run_dir.parent / "mlflow.db").unlink()
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from composer.tracking.mlflow import Record\n"
        "run_dir = Path(sys.argv[2]); run_dir.mkdir()\n"
        "with Record.open(json.loads(sys.argv[1]), run_dir) as record, record.stage('rl') as stage:\n"
        "    for step in range(300): stage.log(step, {f'm{n}': step for n in range(10)})\n"
        "print(record.report.num_unsent, record.report.num_refused)\n"
    )
    commands = [
        [sys.executable, "-c", program, json.dumps(make_config()), str(run_dir.with_name(f"job{n}"))] for n in range(3)
    ]
    jobs = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert outputs == [("0 0\n", "")] * 3, "everything arrived, and nothing was said"
    database = sqlite3.connect(run_dir.parent / "mlflow.db")
    assert database.execute("SELECT count(*) FROM metrics").fetchone() == (3 * 300 * 10,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_logging_costs_microseconds(make_config: Config, run_dir: Path) -> None:
    with Record.open(make_config(), run_dir) as record, record.stage("rl") as stage:
        start = time.process_time(), time.thread_time()
        for step in range(2000):
            stage.log(step, {"reward/mean": 0.5, "loss/policy": 0.1, "staleness/mean": 1.0})
        assert (time.thread_time() - start[1]) / 2000 < 500e-6
        record.flush(60)
    assert runs_of(run_dir)["rl"].data.metrics["reward/mean"] == 0.5


def test_the_memory_of_the_whole_run_is_recorded(make_config: Config, run_dir: Path) -> None:
    held = "import sys; held = b'x' * (300 * 2**20); print('ready', flush=True); sys.stdin.read()"
    with Record.open(make_config(system_metrics_every_s=0.2), run_dir) as record:
        record.flush(60)
        child = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(1.0)
        child.communicate()
    metrics = runs_of(run_dir)["first"].data.metrics
    assert record.peak_rss_bytes > 300 * 2**20
    assert metrics["system/peak_memory_bytes"] == record.peak_rss_bytes
    assert {"system/cpu_percent", "system/num_processes", "system/shm_used_bytes"} < set(metrics)
    history = client_of(run_dir).get_metric_history(record.run_id, "system/memory_bytes")
    assert max(point.value for point in history) <= record.peak_rss_bytes


def test_a_relative_database_is_told_in_full(
    make_config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    with Record.open(make_config(uri="sqlite:///mlflow.db"), run_dir) as record:
        pass
    assert f"sqlite:///{run_dir.parent}/mlflow.db" in record.ui_command
    assert runs_of(run_dir)["first"].info.artifact_uri.startswith((run_dir.parent / "mlartifacts").as_uri())


def test_signs_that_mean_something_in_a_uri_may_stand_in_paths_and_names(
    make_config: Config, tmp_path: Path, empty_database: Path
) -> None:
    run_dir = tmp_path / "50%d2 a?b=c#d" / "first"
    run_dir.mkdir(parents=True)
    database = run_dir.parent / "mlflow.db"
    shutil.copy(empty_database, database)
    config = {**make_config(experiment="a%d2 b?c=d#e"), "run_root": str(run_dir.parent)}
    with Record.open(config, run_dir) as record:
        record.log(1, {"loss": 1.0})
        record.table("rows.json", [{"a": 1}])
    assert record.report is not None and record.report.num_unsent == 0
    words = shlex.split(record.ui_command)
    client = MlflowClient(words[words.index("--backend-store-uri") + 1])
    assert record.run_id is not None
    assert client.get_run(record.run_id).data.metrics == {"loss": 1.0}
    assert [f.path for f in client.list_artifacts(record.run_id, "tables")] == ["tables/rows.json"]
    assert list((run_dir.parent / "mlartifacts" / "a%d2 b?c=d#e").rglob("rows.json"))
    with sqlite3.connect(database) as rows:
        assert rows.execute("select count(*) from metrics").fetchone() == (1,)
    assert sorted(p.name for p in tmp_path.iterdir()) == [run_dir.parent.name]


def test_the_peak_of_an_earlier_start_counts(make_config: Config, run_dir: Path) -> None:
    config = make_config(system_metrics_every_s=0.1)
    held = b"x" * (200 * 2**20)
    with Record.open(config, run_dir) as record:
        time.sleep(0.5)
    first = record.peak_rss_bytes
    del held
    with Record.open(config, run_dir) as record:
        time.sleep(0.3)
    assert record.peak_rss_bytes == first > 200 * 2**20


def test_what_the_user_is_told_to_type_opens_this_database(
    make_config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Record.open(make_config(), run_dir) as record:
        taken_port = taken.getsockname()[1]
        monkeypatch.setattr("composer.tracking.mlflow.UI_PORT", taken_port)
        words = record.ui_command.split()
    assert Path(words[0]).name == "mlflow" and words[1] == "ui"
    assert words[words.index("--backend-store-uri") + 1] == f"sqlite:///{run_dir.parent}/mlflow.db"
    assert words[-4:-1] == ["--host", "127.0.0.1", "--port"] and int(words[-1]) > taken_port
    assert subprocess.run([words[0], "ui", "--help"], capture_output=True, env=os.environ).returncode == 0
    run = runs_of(run_dir)["first"].info
    page = f"http://127.0.0.1:{words[-1]}/#/experiments/{run.experiment_id}/runs/{run.run_id}"
    assert record.ui_address == page
