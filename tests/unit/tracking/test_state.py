"""The state file: read back equal, refused when broken, and whether its writer is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from composer.identity import start_time
from composer.tracking import state as states
from composer.tracking.state import ArtifactEntry, RunEntry, State


def some_state() -> State:
    state = State(uri="sqlite:////x/mlflow.db", experiment="composer", created_ms=5, params={"seed": "1"})
    state.runs = {"": RunEntry("r", 5, tags={"a": "b"}), "rl": RunEntry("rl", 6, run_id="abc", sent_status="RUNNING")}
    state.artifacts.append(ArtifactEntry("rl", "/x/plot.png", "plots"))
    state.positions["metrics.jsonl"] = 42
    return state


def test_it_reads_back_equal(tmp_path: Path) -> None:
    some = some_state()
    some.save(tmp_path)
    read = states.load(tmp_path)
    assert read is not None
    read.runs[""].key = some.runs[""].key
    assert read == some
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.json"]


def test_what_cannot_be_read_counts_as_absent(tmp_path: Path) -> None:
    assert states.load(tmp_path) is None
    for broken in ("", "{}", "[]", '{"runs": {}}', '{"uri": "x", "unknown": 1, "runs": {}, "artifacts": []}'):
        (tmp_path / "mlflow.json").write_text(broken)
        assert states.load(tmp_path) is None


def test_a_writer_is_known_by_its_start_not_by_its_id_alone() -> None:
    state = some_state()
    state.claim()
    assert not state.writer_is_dead()
    state.process_start -= 1  # an earlier process that had this id
    assert state.writer_is_dead()


def test_a_writer_on_another_machine_counts_as_alive() -> None:
    state = some_state()
    state.claim()
    state.host, state.pid = "elsewhere", 1
    assert not state.writer_is_dead()


def test_a_killed_writer_is_dead() -> None:
    state = some_state()
    state.claim()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state.pid, state.process_start = process.pid, start_time(process.pid) or 0
    assert not state.writer_is_dead()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state.writer_is_dead(), "nobody has reaped it yet"
    process.wait()
    assert state.writer_is_dead()


def test_what_was_killed_ended_when_its_process_last_wrote(tmp_path: Path) -> None:
    some_state().save(tmp_path)
    for name, at in (("metrics.jsonl", 50), ("times.json", 52), ("composer.log", 90), ("driver.lock", 90)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    state = states.load(tmp_path)
    assert state is not None
    state.runs["done"] = RunEntry("done", 7, status=states.FINISHED, end_ms=8)
    state.runs["late"] = RunEntry("late", 53_000)
    state.reopen("sqlite:////x/mlflow.db", "composer", tmp_path)
    ended = {stage: (run.status, run.end_ms) for stage, run in state.runs.items()}
    assert ended == {
        "": (states.RUNNING, None),
        "rl": (states.KILLED, 52_000),
        "done": (states.FINISHED, 8),
        "late": (states.KILLED, 53_000),
    }


def test_without_any_other_sign_the_state_file_is_one(tmp_path: Path) -> None:
    state = some_state()
    state.save(tmp_path)
    os.utime(tmp_path / "mlflow.json", (60, 60))
    state.end_killed(tmp_path)
    assert {run.end_ms for run in state.runs.values()} == {60_000}
