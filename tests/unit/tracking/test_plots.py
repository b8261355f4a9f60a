"""Curves come out of `metrics.jsonl`, and only those for which there are numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer.tracking.plots import draw, read_metrics


def write(run_dir: Path, *records: tuple[str | None, int, dict[str, Any]]) -> None:
    lines = [json.dumps({"time": 1, "stage": s, "step": n, "metrics": m}) for s, n, m in records]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_step_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        ("rl", 1, {"reward/mean": 0.1}),
        ("rl", 2, {"reward/mean": 0.2}),
        ("rl", 2, {"reward/mean": 0.3}),
        (None, 0, {"system/cpu_percent": 5}),
    )
    assert read_metrics(tmp_path) == {
        "rl": {"reward/mean": [(1, 0.1), (2, 0.3)]},
        "": {"system/cpu_percent": [(0, 5.0)]},
    }


def test_it_draws_what_there_is(tmp_path: Path) -> None:
    steps = [("rl", n, {"reward/mean": n / 50, "mismatch/k3": "NaN", "loss/policy": 0.1}) for n in range(1, 41)]
    evaluations = [("evaluate_before", 0, {"evaluation/average_at_8": 0.2}), ("evaluate_after", 40, {})]
    write(tmp_path, *steps, *evaluations)
    files = draw(tmp_path)
    assert [path.name for path in files] == ["reward_curve.png", "rl_loss.png"], "NaN alone is no curve"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    assert {path.parent for path in files} == {tmp_path / "plots"}
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["reward_curve.png", "rl_loss.png"]


def test_a_run_without_numbers_draws_nothing(tmp_path: Path) -> None:
    assert draw(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
