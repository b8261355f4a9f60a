"""The quickstart at reduced size, with every part real: killed, resumed, interrupted, mended, resumed to its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from launchers.base import OWNER_VARIABLE, Owner
from tests.conftest import traces, used_by_others

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS = 6
OVERRIDES = [
    "mix.phases.pretrain.tokens=20480",
    "mix.phases.pretrain.checkpoint_every=10",
    "mix.phases.sft.tokens=107520",
    "mix.phases.sft.checkpoint_every=10",
    "mix.sessions.num_sessions=120",
    "evaluation.num_tasks=5",
    "evaluation.samples_per_task=4",
    f"algorithm.num_steps={NUM_STEPS}",
    "algorithm.warmup_steps=1",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=4",
    "algorithm.checkpoint_every=2",
    "algorithm.min_start_average=0",
    "tracking.system_metrics_every_s=2",
]
INTERRUPT_DEADLINE_S = 10.0


class Driver:
    """`python -m composer` as a process, with its output in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / f"output-{time.time_ns()}.txt"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "composer", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, condition, what: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s:\n{self.output}"
            time.sleep(0.1)


def processes_of(pid: int) -> list[psutil.Process]:
    """All processes that carry the mark of driver `pid`."""
    found = []
    for process in psutil.process_iter():
        try:
            owner = Owner.parse(process.environ().get(OWNER_VARIABLE, ""))
        except psutil.Error:
            continue
        if owner is not None and owner.pid == pid:
            found.append(process)
    return found


def listening(processes: list[psutil.Process]) -> set[str]:
    addresses = set()
    for process in processes:
        try:
            connections = process.net_connections("inet")
        except psutil.Error:
            continue
        addresses |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    return addresses


def left_since(before: set[str]) -> set[str]:
    """What is there now, was not before, and belongs to no process that lives."""
    return {trace for trace in traces() - before if not used_by_others(trace, set())}


def events(run_dir: Path) -> list[dict]:
    path = run_dir / "stages" / "rl" / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trained(run_dir: Path) -> dict[int, list[str]]:
    """Step -> groups, as the final weights have seen them."""
    steps: dict[int, list[str]] = {}
    for event in events(run_dir):
        if event["event"] == "step":
            steps[event["step"]] = event["groups"]
        elif event["event"] == "rollback":
            steps = {s: g for s, g in steps.items() if s <= event["step"]}
    return steps


def metrics(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def logged(run_dir: Path, stage: str, name: str) -> dict[int, float]:
    return {m["step"]: m["metrics"][name] for m in metrics(run_dir) if m["stage"] == stage and name in m["metrics"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_resumed_interrupted_resumed(tmp_path):
    before = traces()

    # Killed in the middle of SFT.
    driver = Driver(tmp_path, f"run_root={tmp_path / 'runs'}", *OVERRIDES)
    driver.wait(lambda: "run directory: " in driver.output, "run directory")
    run_dir = Path(driver.output.split("run directory: ")[1].splitlines()[0])
    plan = yaml.safe_load((run_dir / "plan.yaml").read_text())
    pretrain_steps, sft_steps = (p["steps"] for p in plan["stages"][0]["phases"])
    driver.wait(lambda: max(logged(run_dir, "pretrain", "loss/train"), default=0) > pretrain_steps + 12, "SFT step")
    driver.process.kill()
    driver.process.wait()

    # Resumed; killed again in RL, after a checkpoint.
    driver = Driver(tmp_path, f"resume={run_dir}")
    driver.wait(lambda: len(trained(run_dir)) >= 3, "third RL step")
    assert listening(processes_of(driver.process.pid)) <= {"127.0.0.1", "::1"}
    driver.process.kill()
    driver.process.wait()
    before_kill = trained(run_dir)

    # Resumed; interrupted in RL.
    driver = Driver(tmp_path, f"resume={run_dir}")
    driver.wait(lambda: any(e["event"] == "rollback" for e in events(run_dir)), "rollback")
    driver.wait(lambda: len(trained(run_dir)) >= 4, "fourth RL step")
    started = time.monotonic()
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(60) == 130
    assert time.monotonic() - started < INTERRUPT_DEADLINE_S
    assert f"composer resume={run_dir}" in driver.output
    assert processes_of(driver.process.pid) == []
    assert left_since(before) == set()

    # What was finished before the kill was trained as recorded.
    steps = trained(run_dir)
    assert all(steps[s] == ids for s, ids in before_kill.items())

    # A ledger that is behind the checkpoint: said before anything starts, and what is said helps.
    rl = run_dir / "stages" / "rl"
    newest = max(int(p.parent.name.removeprefix("step-")) for p in rl.glob("checkpoints/step-*/.metadata"))
    lines = (rl / "ledger.jsonl").read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if f'"event":"step","step":{newest},' in line)
    (rl / "ledger.jsonl").write_text("".join(lines[:cut]))
    for _ in range(2):
        driver = Driver(tmp_path, f"resume={run_dir}")
        assert driver.process.wait(60) == 2, driver.output
        assert f"delete {rl / 'checkpoints' / f'step-{newest}'}, and resume" in driver.output
        assert "starting" not in driver.output
    shutil.rmtree(rl / "checkpoints" / f"step-{newest}")

    # Resumed to the end.
    driver = Driver(tmp_path, f"resume={run_dir}")
    assert driver.process.wait(600) == 0, driver.output
    assert processes_of(driver.process.pid) == []
    assert left_since(before) == set()

    # No step is missing and no task was trained twice.
    steps = trained(run_dir)
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    groups = [g for ids in steps.values() for g in ids]
    assert len(groups) == len(set(groups)) == 2 * NUM_STEPS
    starts = [e["index"] for e in events(run_dir) if e["event"] == "start"]
    assert len(starts) == len(set(starts))
    assert max(logged(run_dir, "pretrain", "loss/train")) == pretrain_steps + sft_steps

    check_summary(run_dir, tmp_path)
    check_metrics(run_dir)
    check_record(run_dir, tmp_path)

    # A finished run says so.
    again = Driver(tmp_path, f"resume={run_dir}")
    assert again.process.wait(60) == 2
    assert "finished" in again.output

    # RL alone, from what the phases before it have made.
    alone = ["stages=[evaluate_before,rl,evaluate_after]", f"model.checkpoint={run_dir}/stages/pretrain/sft/exported"]
    few = ["algorithm.num_steps=2", "evaluation.num_tasks=2", f"run_root={tmp_path / 'alone'}"]
    driver = Driver(tmp_path, *OVERRIDES, *few, *alone)
    assert driver.process.wait(300) == 0, driver.output
    [summary] = (tmp_path / "alone").glob("*/*/summary.json")
    assert list(json.loads(summary.read_text())["stages"]) == ["evaluate_before", "rl", "evaluate_after"]
    assert sorted(trained(summary.parent)) == [1, 2]
    assert "expert" not in driver.output  # nothing is fine-tuned, so no sessions are recorded


def check_summary(run_dir: Path, tmp_path: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    for when in ("before", "after"):
        evaluation = summary["evaluation"][when]
        assert 0 <= evaluation["average_at_4"] <= evaluation["best_at_4"] <= 1
        assert evaluation["num_tasks"] == 5 and evaluation["num_episodes"] + evaluation["lost_episodes"] == 20
    assert summary["wall_s"] > 0
    assert 2**28 < summary["peak_rss_bytes"] < 8 * 2**30
    assert summary["codebase_loss"]["after"] < summary["codebase_loss"]["before"]


def check_metrics(run_dir: Path) -> None:
    for name in (
        "reward/mean",
        "loss/policy",
        "train/grad_norm",
        "train/worst_expert_load",
        "mismatch/max",
        "mismatch/p90",
        "mismatch/p99",
        "mismatch/k3",
        "staleness/max",
        "throughput/generated_tokens_per_s",
    ):
        assert sorted(logged(run_dir, "rl", name)) == list(range(1, NUM_STEPS + 1)), name
    assert max(logged(run_dir, "rl", "mismatch/p90").values()) < 1e-4
    assert max(logged(run_dir, "rl", "staleness/max").values()) <= 1
    assert len(logged(run_dir, "pretrain", "loss/codebase")) >= 3
    trained_tokens = logged(run_dir, "pretrain", "throughput/trained_tokens_per_s")
    assert set(trained_tokens) == set(logged(run_dir, "pretrain", "loss/train")) and min(trained_tokens.values()) > 0


def check_record(run_dir: Path, tmp_path: Path) -> None:
    """The record in MLflow, read back through MLflow's own client."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("composer")
    runs = client.search_runs([experiment.experiment_id])
    [parent] = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    stages = {r.data.tags["mlflow.runName"]: r for r in runs if r is not parent}
    assert set(stages) == {"pretrain", "evaluate_before", "rl", "evaluate_after"}
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert {r.data.tags["mlflow.parentRunId"] for r in stages.values()} == {parent.info.run_id}
    assert parent.data.params["algorithm.group_size"] == "4"
    rewards = client.get_metric_history(stages["rl"].info.run_id, "reward/mean")
    assert {m.step for m in rewards} == set(range(1, NUM_STEPS + 1))
    assert any(f.path.endswith("reward_curve.png") for f in client.list_artifacts(parent.info.run_id, "plots"))
    # Every tool call of the sampled episodes is a span with its arguments; a step trained again is recorded once. What
    # this test cut off the ledger was sampled anew, under its old name: the record keeps what it had.
    lines = [json.loads(line) for line in (run_dir / "traces.jsonl").read_text().splitlines()]
    sampled = {(r["stage"], r["step"], r["trajectory"]["episode_id"]): r["trajectory"]["turns"] for r in lines[::-1]}
    calls = [(c["name"], c["arguments"]) for turns in sampled.values() for turn in turns for c in turn["tool_calls"]]
    spans = [s for t in client.search_traces(locations=[experiment.experiment_id]) for s in t.data.spans]
    sent = [(s.name, s.inputs) for s in spans if s.span_type == "TOOL"]
    assert calls and sorted(sent, key=repr) == sorted(calls, key=repr)
