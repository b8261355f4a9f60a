"""What a run says of itself at its end, from what lies in its directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer.clock import Clock
from composer.compose import compose
from composer.errors import ResumeError
from composer.layout import Layout
from composer.plan import make_plan
from composer.run import check_left, summarise
from composer.rundir import RunDirectory, Status
from composer.schema import Stage
from composer.tracking.journal import Journal


def test_an_interrupted_run_tells_how_far_each_stage_came(tmp_path: Path) -> None:
    config = compose(["evaluation.num_tasks=5", "algorithm.num_steps=60"])
    layout, clock = Layout(tmp_path), Clock(tmp_path / "times.json")
    layout.finish(Stage.pretrain, {"wall_s": 12.5, "summary": {"steps": 40}, "codebase_loss": {"before": 7.0}})
    (layout.stage(Stage.evaluate_before)).mkdir(parents=True)
    (layout.stage(Stage.evaluate_before) / "groups.jsonl").write_text("{}\n{}\n{}\n{half a li")
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        journal.append({"stage": "rl", "step": step, "metrics": {"reward/mean": 0.5}})
    for stage in (Stage.evaluate_before, Stage.rl):
        with clock.stage(stage.value):
            pass
    summary = summarise(layout, make_plan(config), config, clock, 0)
    assert summary["stages"]["pretrain"] == {"wall_s": 12.5, "steps": 40}
    reached = {n: (s["unit"], s["done"], s["of"]) for n, s in summary["stages"].items() if "of" in s}
    assert reached == {"evaluate_before": ("task", 3, 5), "rl": ("step", 3, 60)}, "evaluate_after never began"
    assert (summary["starts"], summary["codebase_loss"]) == (1, {"before": 7.0})


def test_what_an_earlier_start_left_is_read_before_anything_starts(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    check_left(list(Stage), layout)
    for stage, step in ((Stage.pretrain, 7), (Stage.rl, 5)):
        folder = layout.stage(stage) / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    check_left([Stage.pretrain, Stage.evaluate_before], layout)
    with pytest.raises(ResumeError, match=r"delete .*/rl/checkpoints/step-5"):
        check_left([Stage.rl], layout)
    layout.stage(Stage.evaluate_after).mkdir()
    (layout.stage(Stage.evaluate_after) / "groups.jsonl").write_text("{}\n")
    with pytest.raises(ResumeError, match=r"evaluate_after/groups\.jsonl is damaged"):
        check_left([Stage.evaluate_after], layout)


def test_a_process_that_hangs_inside_ray_ends_with_all_that_a_failure_says(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    code = f"""
import threading, time
from pathlib import Path
from composer.errors import ClusterError
from composer.run import end_process
from composer.rundir import RunDirectory

def broken():
    raise OSError("a launcher that fails, too")

endings = [broken, lambda: print("the record is closed", flush=True)]
arguments = ClusterError("Ray's raylet ended"), RunDirectory(Path({str(tmp_path)!r})), endings
threading.Thread(target=end_process, args=arguments).start()
time.sleep(100)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "the record is closed\n")
    first, second, third = done.stderr.splitlines()
    assert first == "composer: Ray's raylet ended" and second.endswith(str(tmp_path / "logs"))
    assert third.startswith("composer: what is finished is kept") and third.endswith(f"composer resume={tmp_path}")
    assert RunDirectory(tmp_path).status is Status.failed
