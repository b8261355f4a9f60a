"""What the tests of the record share: a run's config, an episode, real MLflow servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from composer.types import Generation, Message, Outcome, ToolCall, Trajectory, Turn


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A config's plain mapping, as far as the record reads it."""

    def make(**tracking: Any) -> dict[str, Any]:
        settings = {"uri": None, "experiment": "composer", "timeout_s": 5.0, "system_metrics_every_s": None, **tracking}
        return {
            "seed": 3,
            "run_root": str(tmp_path / "runs"),
            "tracking": settings,
            "algorithm": {"learning_rate": 3e-4},
        }

    return make


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, which take seconds to create."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def run_dir(tmp_path: Path, empty_database: Path) -> Path:
    """An empty run directory, in a run root with an empty database."""
    path = tmp_path / "runs" / "first"
    path.mkdir(parents=True)
    shutil.copy(empty_database, path.parent / "mlflow.db")
    return path


@pytest.fixture
def trajectory() -> Trajectory:
    """An episode of two turns, the first with a tool call."""
    call = ToolCall("read_file", {"path": "main.py"})
    return Trajectory(
        task_id="micro/train/7",
        group_id="g1",
        episode_id="g1/0",
        turns=[
            Turn([1, 2], Generation([3, 4], [-0.5, -1.5], [6, 7], "stop"), [call], "def f()", 1.0),
            Turn([5], Generation([6], [-0.25], [7], "stop"), [], "", 0.5),
        ],
        messages=[
            Message("user", "f fails"),
            Message("assistant", "<tool_call>", (call,)),
            Message("tool", "def f()"),
            Message("assistant", "done"),
        ],
        outcome=Outcome.FINISHED,
        reward=0.75,
        rewards={"hidden_tests": 1.0},
        seconds=1.5,
    )


class MlflowServer:
    """A real `mlflow server` on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        """Choose a port; `start` starts it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/server.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return
            time.sleep(0.1)
        raise TimeoutError((self._folder / "server.log").read_text())

    def kill(self) -> None:
        """`kill -9` it and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One server for all tests; a test that kills it starts it again."""
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts connections (the kernel does) and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def dead_server() -> str:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
