"""A run under which Ray's own processes are killed: one sentence, nothing left behind, and it is resumed."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
ENDLESS = [
    "stages=[pretrain]",
    "mix.phases.pretrain.tokens=5120000",
    "mix.sessions.num_sessions=64",
]
"""Ended by the test."""
HANGING = textwrap.dedent(
    """
    import os, pathlib, sys
    from composer import cluster
    from launchers.local import LocalLauncher

    def give_up(error):
        print(error, flush=True)
        launcher.stop()
        os._exit(1)

    cluster.HANGS_AFTER_S = 2.0
    launcher = LocalLauncher("hanging", {"CPU": 1}, object_store_bytes=100 * 2**20)
    with cluster.Watch(pathlib.Path("logs"), give_up):
        launcher.start()
        import ray

        print(launcher._folder, flush=True)
        input()
        ray.util.placement_group([{"CPU": 1}])
        print("it does not hang", flush=True)
    """
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def of_run(driver: int) -> list[psutil.Process]:
    """The processes that carry the mark of a driver, and Ray's, which are its children."""
    found = []
    for process in psutil.process_iter():
        try:
            if f":{driver}:" in process.environ().get("COMPOSER_OWNER", "") and process.pid != driver:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(driver: int, *names: str) -> None:
    """Kill Ray's processes of these names; without names, all that the driver has."""
    doomed = []
    for process in psutil.Process(driver).children(recursive=True):
        # Some children live for a moment only, and killing one ends others: what is gone needs no kill.
        with contextlib.suppress(psutil.NoSuchProcess):
            if not names or process.name() in names:
                process.kill()
                doomed.append(process)
    assert len(doomed) >= max(1, len(names))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rays_processes_are_killed_and_the_run_is_resumed(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "output.txt", tmp_path / "run"
    ends = (("raylet",), "node manager (raylet, SIGKILL)"), (("gcs_server",), "control service (gcs_server, SIGKILL)")
    arguments = [f"hydra.run.dir={run_dir}", f"run_root={tmp_path}", *ENDLESS]
    for names, part in (*ends, ((), "control service (gcs_server, SIGKILL) and its node manager (raylet, SIGKILL)")):
        with log.open("w") as output:
            command = [sys.executable, "-m", "composer", *arguments]
            driver = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 150
        while "pretrain: " not in log.read_text():
            assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        time.sleep(1.0)
        kill(driver.pid, *names)
        killed = time.monotonic()
        assert driver.wait(60) == 1, log.read_text()
        assert time.monotonic() - killed < 30
        lines = [line for line in log.read_text().splitlines() if line.startswith("composer: ")]
        assert f"Ray's {part} ended under the run" in lines[0] and len(lines) == 3, log.read_text()
        assert lines[2].endswith(f"composer resume={run_dir}")
        for words in ("Traceback", "state-dump", "usual cause", "env workers of"):
            assert words not in log.read_text()
        assert json.loads((run_dir / "status.json").read_text())["status"] == "failed"
        assert json.loads((run_dir / "mlflow.json").read_text())["runs"][""]["sent_status"] == "FAILED"
        assert of_run(driver.pid) == []
        arguments = [f"resume={run_dir}"]


@pytest.mark.timeout(120)
def test_a_driver_that_waits_for_ray_in_vain_is_ended(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None and driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    assert folder.is_dir()
    kill(driver.pid, "gcs_server")
    killed = time.monotonic()
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.wait(60) == 1
    assert time.monotonic() - killed < 30
    assert driver.stdout.read().startswith("Ray's control service (gcs_server, SIGKILL) ended under the run")
    assert of_run(driver.pid) == [] and not folder.exists()
    assert (tmp_path / "logs" / "gcs_server.out").is_file()
