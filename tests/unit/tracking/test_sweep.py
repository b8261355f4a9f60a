"""The table that closes a sweep. The sweep itself is an integration test."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer.tracking.state import SWEEP_VARIABLE
from composer.tracking.sweep import SweepCallback, _job_line, _print_table

RESULTS = {
    "evaluation/before/average_at_8": 0.4941,
    "evaluation/before/best_at_8": 0.8125,
    "codebase_loss/before": 7.213,
    "evaluation/after/average_at_8": 0.7411,
    "evaluation/after/best_at_8": 0.9062,
    "codebase_loss/after": 4.4,
}


def job(number: int, *overrides: str, **more: object) -> dict[str, object]:
    return {"number": number, "status": "FINISHED", "overrides": ["seed=7", *overrides], "wall_s": 412.0, **more}


def test_no_cell_is_broken_at_the_width_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "mix.phases.pretrain.learning_rate=0.0003"
    _print_table([job(0, wide, results=RESULTS), job(1, "mix.phases.pretrain.learning_rate=0.001", status="FAILED")])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 120 for line in lines)
    [head] = [line.split("  ") for line in lines if "overrides" in line]
    assert [c.strip() for c in head if c.strip()] == [
        "job", "overrides", "status", "average@8", "best@8", "codebase loss", "time",
    ]  # fmt: skip
    [row] = [line.split("  ") for line in lines if wide in line]
    assert [c.strip() for c in row if c.strip()] == [
        "0", wide, "FINISHED", "0.494 -> 0.741", "0.812 -> 0.906", "7.21 -> 4.4", "6m 52s",
    ]  # fmt: skip
    [failed] = [line.split() for line in lines if "FAILED" in line]
    assert failed[3:6] == ["-", "-", "-"]


def test_the_only_job_of_an_interrupted_sweep_shows_what_was_swept(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["seed=7", "algorithm.learning_rate=0.1,0.3"]
    _print_table([job(0, "algorithm.learning_rate=0.1", status="KILLED")], typed)
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "KILLED" in line]
    assert row == ["0", "algorithm.learning_rate=0.1", "KILLED", "6m", "52s"]
    _print_table([job(0)], ["seed=7"])
    assert "seed=7" in capsys.readouterr().out, "a sweep of one job"


def test_a_refused_job_names_no_directory_that_is_gone(tmp_path: Path) -> None:
    failed = job(0, status="FAILED", error="no disk", run_dir=str(tmp_path / "0"), wall_s=1.0)
    assert _job_line(failed) == "sweep job 0 FAILED after 1.0s: no disk"
    (tmp_path / "0").mkdir()
    assert _job_line(failed) == f"sweep job 0 FAILED after 1.0s: no disk (run directory {tmp_path / '0'})"


def test_a_job_is_told_by_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SWEEP_VARIABLE, "")  # so that it is put back
    hydra = SimpleNamespace(
        mode="MULTIRUN",
        sweep=SimpleNamespace(dir=tmp_path),
        job=SimpleNamespace(num=0),
        runtime=SimpleNamespace(output_dir=tmp_path / "0"),
        overrides=SimpleNamespace(task=["++mix.phases.sft.warmup_steps=3", "seed=1"]),
    )
    SweepCallback().on_job_start(SimpleNamespace(hydra=hydra))  # type: ignore[arg-type]
    assert "starts: mix.phases.sft.warmup_steps=3 seed=1" in capsys.readouterr().out
    stored = json.loads((tmp_path / "jobs" / "0.json").read_text())
    assert stored["overrides"] == ["mix.phases.sft.warmup_steps=3", "seed=1"]
