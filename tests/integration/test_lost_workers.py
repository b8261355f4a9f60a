"""A run that loses its env workers: one is killed, the other hangs in a user's taskset when the run is interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
SMALL = [
    "stages=[pretrain,rl]",
    "mix.phases.pretrain.tokens=5120",
    "mix.phases.sft.tokens=8960",
    "mix.phases.pretrain.warmup_steps=0",
    "mix.phases.sft.warmup_steps=1",
    "mix.sessions.num_sessions=64",
    "algorithm.num_steps=1000",
    "algorithm.warmup_steps=0",
    "algorithm.groups_per_step=1",
    "algorithm.group_size=2",
    "algorithm.min_start_average=0",
    "env.num_workers=2",
]
TASKSET = """
import pathlib, time
from envs.tasks.micro import MicroTaskset

class Hanging(MicroTaskset):
    def task(self, split, index):
        while pathlib.Path(__file__).with_name("hang").exists():
            time.sleep(1000)
        return super().task(split, index)
"""


def processes_of(driver: int, name: str = "") -> list[psutil.Process]:
    """Processes that carry the mark of a driver and have `name` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if f":{driver}:" in process.environ().get("COMPOSER_OWNER", "") and name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def traces_of(driver: int) -> list[str]:
    """What is left on this machine of a run that has ended; all of it has the driver's number in its name."""
    temporary = Path(tempfile.gettempdir())
    named = re.compile(rf"composer.*[-.]{driver}([-.]|$)")
    places = [
        *Path("/dev/shm").iterdir(),
        *Path("/sys/fs/cgroup").glob("**/composer*"),
        *temporary.glob("composer-sandbox-*/*"),
    ]
    places = [p for p in places if named.search(p.name)] + list(temporary.glob(f"composer-ray-{driver}-*"))
    return [str(p) for p in places] + [
        m for m in Path("/proc/self/mountinfo").read_text().splitlines() if named.search(m)
    ]


@pytest.fixture
def driver():
    """Drivers to be started, which end with the test."""
    started = []
    yield started
    for process in started:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.slow
def test_a_killed_env_worker_and_one_that_hangs(tmp_path, driver):
    (tmp_path / "hanging.py").write_text(TASKSET)
    log = tmp_path / "output.txt"
    command = [sys.executable, "-m", "composer"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    plugin = ["plugins=[hanging]", "env.taskset._target_=hanging.Hanging"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"run_root={tmp_path / 'runs'}", *SMALL, *plugin],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    driver.append(process)

    def wait(condition):
        deadline = time.monotonic() + 200
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def steps():
        ledgers = list((tmp_path / "runs").glob("*/*/stages/rl/ledger.jsonl"))
        return sum('"event":"step"' in line for path in ledgers for line in path.read_text().splitlines())

    # One worker is killed: the run goes on without it and says so.
    wait(lambda: steps() >= 1)
    [plan] = (tmp_path / "runs").glob("*/*/plan.yaml")
    run_dir = plan.parent
    processes_of(process.pid, "ray::EnvWorker")[0].kill()
    wait(lambda: "going on with 1 env workers of 2" in log.read_text())
    done = steps()
    wait(lambda: steps() >= done + 2)

    # The other one hangs where nothing can wake it: Ctrl-C still ends everything.
    (tmp_path / "hang").touch()
    time.sleep(2.0)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    assert time.monotonic() - started < 10
    assert "Traceback" not in log.read_text()
    assert json.loads((run_dir / "status.json").read_text())["status"] == "interrupted"
    assert processes_of(process.pid) == [] and traces_of(process.pid) == []

    # From another folder its plugin is still found.
    resume = [*command, "plan", f"resume={run_dir}"]
    again = subprocess.run(resume, cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stdout + again.stderr
