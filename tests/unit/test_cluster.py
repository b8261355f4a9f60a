"""Ray's own processes that end, with ordinary processes in their place. The real ones end in an integration test."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer import cluster
from composer.cluster import Watch
from composer.errors import ClusterError


class Node:
    """Stands in for Ray's record of the processes that it started, or of those it joined."""

    def __init__(self, logs: Path) -> None:
        self.all_processes: dict[str, list[Any]] = {}
        self.logs = logs
        self.raylet_socket_name, self.gcs_address = "", ""

    def start(self, name: str, code: str = "input()") -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.all_processes[name] = [SimpleNamespace(process=process)]
        (self.logs / f"{name}.out").write_text(f"the log of {name}")
        return process

    def get_logs_dir_path(self) -> str:
        return str(self.logs)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.02)
    monkeypatch.setattr(cluster, "JOINED_POLL_S", 0.5)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    (tmp_path / "ray").mkdir()
    node = Node(tmp_path / "ray")
    monkeypatch.setitem(sys.modules, "ray._private.worker", SimpleNamespace(_global_node=node))
    yield node
    for [started] in node.all_processes.values():
        started.process.kill()
        started.process.communicate()


def noticed(watch: Watch, timeout_s: float = 10.0) -> str:
    deadline = time.monotonic() + timeout_s
    while watch.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return str(watch.error)


def never(error: ClusterError) -> None:
    raise AssertionError("nothing hangs")


def test_what_ended_is_named_and_its_log_is_kept(node: Node, tmp_path: Path) -> None:
    node.start("gcs_server")
    raylet = node.start("raylet")
    heard: list[ClusterError] = []
    with Watch(tmp_path / "logs", never) as watch:
        watch.on_end(heard.append)
        time.sleep(0.2)
        assert watch.error is None
        raylet.kill()
        assert noticed(watch) == (
            "Ray's node manager (raylet, SIGKILL) ended under the run, which cannot go on without it; if nobody killed "
            "it, `dmesg` tells whether the kernel did, for want of memory"
        )
        assert heard == [watch.error] and watch.error.exit_code == 1
        late: list[ClusterError] = []
        watch.on_end(late.append)
        assert late == heard
        watch.acknowledge()
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["raylet.out"]
    assert (tmp_path / "logs" / "raylet.out").read_text() == "the log of raylet"


def test_what_ends_together_is_named_together(node: Node, tmp_path: Path) -> None:
    processes = [node.start(name) for name in ("gcs_server", "raylet")]
    with Watch(tmp_path / "logs", never) as watch:
        for process in processes:
            process.kill()
        assert "control service (gcs_server, SIGKILL) and its node manager (raylet, SIGKILL) ended" in noticed(watch)
        watch.acknowledge()


def test_one_that_ends_by_itself_is_no_lack_of_memory(node: Node, tmp_path: Path) -> None:
    node.start("gcs_server", "raise SystemExit(3)")
    with Watch(tmp_path / "logs", never) as watch:
        sentence = "Ray's control service (gcs_server, exit code 3) ended under the run, which cannot go on without it"
        assert noticed(watch) == sentence
        watch.acknowledge()


def test_the_end_of_a_run_is_no_surprise(node: Node, tmp_path: Path) -> None:
    raylet = node.start("raylet")
    with Watch(tmp_path / "logs", never) as watch:
        time.sleep(0.1)
        watch.expect_end()
        raylet.kill()
        raylet.wait()
        time.sleep(0.3)
        assert watch.error is None


@pytest.mark.parametrize("heard", [False, True])
def test_a_main_thread_that_hangs_is_given_up(
    heard: bool, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "HANGS_AFTER_S", 60.0 if heard else 0.1)
    monkeypatch.setattr(cluster, "GIVE_UP_AFTER_S", 0.1)
    given_up = threading.Event()
    raylet = node.start("raylet")
    with Watch(tmp_path / "logs", lambda error: given_up.set()) as watch:
        watch.on_end(lambda error: watch.acknowledge() if heard else None)
        raylet.kill()
        assert given_up.wait(10)


def test_an_event_loop_that_has_closed_does_no_harm(node: Node, tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    raylet = node.start("raylet")
    with Watch(tmp_path / "logs", never) as watch:
        watch.on_end(lambda error: loop.call_soon_threadsafe(print))
        raylet.kill()
        assert "raylet" in noticed(watch)
        watch.acknowledge()


def test_why_an_actor_died(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SETTLE_S", 0.2)
    assert asyncio.run(cluster.cause_of_death()) is None, "nobody watches"
    raylet = node.start("raylet")
    with Watch(tmp_path / "logs", never) as watch:
        assert asyncio.run(cluster.cause_of_death()) is None, "Ray lives"
        monkeypatch.setattr(cluster, "SETTLE_S", 10.0)
        raylet.kill()
        assert asyncio.run(cluster.cause_of_death()) is watch.error is not None
        watch.acknowledge()
    assert asyncio.run(cluster.cause_of_death()) is None


@pytest.fixture
def joined(node: Node, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A node manager's socket, and a head that listens."""
    node.raylet_socket_name = str(tmp_path / "raylet")
    raylet = socket.socket(socket.AF_UNIX)
    raylet.bind(node.raylet_socket_name)
    raylet.listen()
    with raylet, socket.create_server(("127.0.0.1", 0)) as head:
        node.gcs_address = f"127.0.0.1:{head.getsockname()[1]}"
        yield raylet, head


def test_a_node_manager_of_a_joined_cluster(joined: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    raylet, _ = joined
    with Watch(tmp_path / "logs", never) as watch:
        time.sleep(0.3)
        assert watch.error is None
        raylet.close()
        assert "Ray's node manager (raylet, of this machine) ended" in noticed(watch)
        watch.acknowledge()


def test_the_head_of_a_joined_cluster_may_be_away_for_a_while(
    joined: tuple[socket.socket, socket.socket], node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head = joined
    monkeypatch.setattr(cluster, "SILENT_S", 1.0)
    with Watch(tmp_path / "logs", never) as watch:
        time.sleep(0.3)
        head.close()
        time.sleep(0.7)
        assert watch.error is None
        assert f"(gcs_server, at {node.gcs_address}, which has not answered for 1 s: " in noticed(watch)
        watch.acknowledge()


def test_signals_have_names() -> None:
    assert [cluster._how(code) for code in (-signal.SIGTERM, 1, -77)] == ["SIGTERM", "exit code 1", "signal 77"]
