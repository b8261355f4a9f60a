"""State folders: who is alive, and what a sweep may touch."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from envs.sandbox import state
from envs.sandbox.state import State, runtime_folder, start_time, sweep


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"composer-sandbox-{os.geteuid()}"


def test_a_folder_carries_label_process_and_start_time(runtime: Path) -> None:
    one, two = State.create("my run/7"), State.create("my run/7")
    assert one.folder == runtime / f"my-run-7.{os.getpid()}.{start_time(os.getpid())}"
    assert two.folder == Path(f"{one.folder}.1")
    assert sweep() == 0
    one.remove()
    two.remove()
    assert list(runtime.iterdir()) == []


def test_a_dead_owners_folder_and_watchdog_are_removed(runtime: Path) -> None:
    watchdog = subprocess.Popen(["sleep", "60"])
    dead = State.create("dead")
    dead.record({"control_groups": [], "watchdog": watchdog.pid, "watchdog_start": start_time(watchdog.pid)})
    os.close(dead.lock)  # what the kernel does when the owner dies
    assert sweep() == 1
    assert not dead.folder.exists()
    assert watchdog.wait(5) == -9


def test_a_process_that_took_over_the_number_is_left_alone(runtime: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    dead = State.create("dead")
    dead.record({"control_groups": [], "watchdog": other.pid, "watchdog_start": start_time(other.pid) - 1})
    os.close(dead.lock)
    assert sweep() == 1
    assert other.poll() is None
    other.kill()
    other.wait()


def test_broken_records_do_not_stop_a_sweep(runtime: Path) -> None:
    dead = State.create("dead")
    (dead.folder / "backend.json").write_text("{")
    os.close(dead.lock)
    fresh, old = runtime / "fresh", runtime / "old"
    for folder in (fresh, old):
        folder.mkdir()
    os.utime(old, (time.time() - 100,) * 2)
    assert sweep() == 2
    assert list(runtime.iterdir()) == [fresh]


def test_control_groups_are_removed_with_their_children(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "group" / "00001").mkdir(parents=True)
    dead = State.create("dead")
    (dead.folder / "backend.json").write_text(json.dumps({"control_groups": [str(tmp_path / "group")]}))
    os.close(dead.lock)
    assert sweep() == 1
    assert not (tmp_path / "group").exists()


def test_a_runtime_folder_of_others_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else may write"):
        runtime_folder()
    assert sweep() == 0


def test_start_time_of_no_process() -> None:
    assert start_time(2**22 + 1) == 0
    assert state.start_time(os.getpid()) == int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
