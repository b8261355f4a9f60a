"""The state file: read back equal, refused when broken, and whether its writer is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = states.process_start(process.pid)
    assert started is not None and started >= (states.process_start(os.getpid()) or 0)
    process.kill()
    process.wait()
    assert states.process_start(process.pid) is None
