"""The local launcher with a real Ray: on loopback only, nothing left behind, also after kill -9."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from launchers.base import OWNER_VARIABLE, Owner
from launchers.local import LocalLauncher

SCRIPT = textwrap.dedent(
    """
    import sys, time
    from launchers.local import LocalLauncher

    launcher = LocalLauncher(sys.argv[1], {"CPU": 4}, object_store_bytes=100 * 2**20)
    address = launcher.start()
    import ray

    @ray.remote(num_cpus=1)
    class Actor:
        def answer(self):
            return 42

    actor = Actor.remote()
    print(address, ray.get(actor.answer.remote()), launcher._folder, flush=True)
    if sys.argv[2] == "stop":
        launcher.stop()
    else:
        time.sleep(600)
    """
)


def marked(label):
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        owner = Owner.parse(environ.get(OWNER_VARIABLE, ""))
        if owner is not None and owner.label == label:
            found.append(process)
    return found


def start(label, then):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, label, then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    address, answer, folder = line.split()
    assert answer == "42"
    return process, address, Path(folder)


@pytest.fixture
def busy_ports():
    """Somebody listens where Ray's head and its dashboard do by default."""
    with contextlib.ExitStack() as stack:
        for port in (6379, 8265, 10001):
            with contextlib.suppress(OSError):  # busy already
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("busy_ports")
def test_it_listens_on_loopback_and_stops_without_a_trace():
    process, address, _ = start("launcher-test-stop", "sleep")
    try:
        assert address.startswith("127.0.0.1:")
        listening = [
            c for p in marked("launcher-test-stop") for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN
        ]
        assert listening, "Ray's servers are found by their mark"
        hosts = {c.laddr.ip.removeprefix("::ffff:") for c in listening}
        assert hosts <= {"127.0.0.1", "::1"}
    finally:
        process.kill()
        process.wait()
        LocalLauncher("launcher-test-sweeper", {}).sweep()

    process, _, folder = start("launcher-test-stop", "stop")
    assert process.wait(30) == 0
    assert marked("launcher-test-stop") == []
    assert not folder.exists()


@pytest.mark.timeout(120)
def test_after_kill_9_the_next_start_sweeps_what_is_left():
    process, _, folder = start("launcher-test-kill", "sleep")
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)
    assert folder.exists()
    assert LocalLauncher("launcher-test-sweeper", {}).sweep() >= 1
    assert marked("launcher-test-kill") == []
    assert not folder.exists()


def test_the_logs_of_a_start_that_failed_stay_until_the_next_sweep():
    code = textwrap.dedent(
        """
        from launchers.local import LocalLauncher

        launcher = LocalLauncher("launcher-test-failed", {"CPU": 1}, object_store_bytes=2**60)
        try:
            launcher.start()
        except Exception as e:
            print(e)
        launcher.stop()
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert "Ray did not start on this machine" in done.stdout, done.stderr
    folder = Path(done.stdout.split("; see ")[1].split(" for its logs")[0])
    assert folder.is_dir() and marked("launcher-test-failed") == []
    LocalLauncher("launcher-test-sweeper", {}).sweep()
    assert not folder.exists()
