"""Who cleans up: `stop`, `close`, the watchdog of a killed owner, and the sweep of the next start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError
from envs.sandbox import state
from envs.sandbox.bubblewrap import BubblewrapBackend

REPO = Path(__file__).resolve().parents[4]
OWNER = """
import asyncio, sys
from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("owner", python=False)
    sandboxes = [await backend.start({"f": b"1"}, SandboxLimits()) for _ in range(2)]
    try:
        for sandbox in sandboxes:
            await sandbox.shell("(setsid sleep MARK &); cd /tmp")
        groups = backend._groups.folders if backend._groups else ()
        print(backend._state.folder, backend._server.watchdog, *groups, flush=True)
        await sandboxes[0].shell("sleep MARK", timeout_s=90)
    finally:
        await backend.close()

asyncio.run(main())
"""


def sleepers(mark: str) -> list[int]:
    """Processes of the whole machine that run `sleep mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{mark}\0".encode():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class Owner:
    """Another process that owns two sandboxes with three sleepers."""

    def __init__(self) -> None:
        """Wait until everything runs."""
        self.mark = f"{os.getpid()}{time.monotonic_ns() % 10**6}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.replace("MARK", self.mark)],
            cwd=REPO,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        folder, watchdog, *groups = self.process.stdout.readline().split()
        self.state, self.watchdog, self.groups = Path(folder), int(watchdog), [Path(group) for group in groups]
        wait_for(lambda: len(sleepers(self.mark)) == 3)
        assert self.state.exists()
        assert all(group.exists() for group in self.groups)

    def left(self) -> list[object]:
        """What is left of it."""
        return [*sleepers(self.mark), *(path for path in (self.state, *self.groups) if path.exists())]


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    """A running owner, in a runtime folder where nobody else's leftovers are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    owner = Owner()
    yield owner
    owner.process.kill()
    owner.process.wait()


def test_nothing_is_left_of_a_killed_owner(owner: Owner) -> None:
    owner.process.kill()
    owner.process.wait()
    assert wait_for(lambda: not owner.left()), owner.left()


def test_nothing_is_left_of_an_owner_that_forgot_to_close(tmp_path: Path) -> None:
    forgetful = OWNER[: OWNER.index("    try:")] + "\nasyncio.run(main())\n"
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    for _ in range(3):
        subprocess.run([sys.executable, "-c", forgetful], cwd=REPO, env=environment, check=True, timeout=60)
        runtime = tmp_path / f"composer-sandbox-{os.geteuid()}"
        assert wait_for(lambda runtime=runtime: not list(runtime.iterdir()))


def test_nothing_is_left_after_ctrl_c(owner: Owner) -> None:
    os.killpg(owner.process.pid, signal.SIGINT)
    assert owner.process.wait(10) != 0
    assert wait_for(lambda: not owner.left(), 1), owner.left()


def test_sweep_removes_what_the_dead_left_and_nothing_of_the_living(owner: Owner) -> None:
    assert state.sweep() == 0
    assert len(sleepers(owner.mark)) == 3
    os.kill(owner.process.pid, signal.SIGSTOP)  # it must not clean up
    os.kill(owner.watchdog, signal.SIGKILL)
    assert wait_for(lambda: not sleepers(owner.mark)), "sandboxes must end with their watchdog"
    assert state.sweep() == 0
    assert owner.state.exists()
    owner.process.kill()
    owner.process.wait()
    assert all(path.exists() for path in (owner.state, *owner.groups))
    assert BubblewrapBackend("next").sweep() == 1
    assert not owner.left()
    assert state.sweep() == 0


def test_stop_removes_everything_and_may_be_called_twice(backend: BubblewrapBackend, run: Callable) -> None:
    mark = f"7{time.monotonic_ns() % 10**8}"
    sandbox = run(backend.start({}, SandboxLimits()))
    run(sandbox.shell(f"(setsid sleep {mark} &); trap '' TERM"))
    assert wait_for(lambda: len(sleepers(mark)) == 1)
    groups = list(sandbox._group.folders) if sandbox._group else []
    assert all(group.exists() for group in groups)

    async def stop_twice_at_once() -> None:
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        await sandbox.stop()

    run(stop_twice_at_once())
    assert not sleepers(mark)
    assert not any(group.exists() for group in groups)
    for call in (
        sandbox.shell("true"),
        sandbox.exec(["true"]),
        sandbox.read("x"),
        sandbox.write("x", b""),
        sandbox.files(),
        sandbox.stats(),
    ):
        with pytest.raises(SandboxError, match="stopped"):
            run(call)


def test_stop_during_a_command_ends_the_command(backend: BubblewrapBackend, run: Callable) -> None:
    async def scenario() -> None:
        sandbox = await backend.start({}, SandboxLimits())
        command = asyncio.ensure_future(sandbox.shell("sleep 30"))
        await asyncio.sleep(0.2)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await command

    run(scenario())


def test_many_at_once(backend: BubblewrapBackend, run: Callable) -> None:
    async def one(number: int) -> bytes:
        sandbox = await backend.start({"n": str(number).encode()}, SandboxLimits())
        try:
            await sandbox.shell("sleep 0.3")
            return (await sandbox.shell("cat n")).output
        finally:
            await sandbox.stop()

    async def scenario() -> list[bytes]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert run(scenario()) == [str(number).encode() for number in range(20)]


def test_close_stops_all_and_the_backend_can_be_used_again(run: Callable) -> None:
    async def scenario() -> None:
        backend = BubblewrapBackend("again", python=False)
        await backend.close()
        for _ in range(2):
            sandbox = await backend.start({}, SandboxLimits())
            folder = backend._state.folder
            assert folder.exists()
            await backend.close()
            await backend.close()
            assert not folder.exists()
            with pytest.raises(SandboxError):
                await sandbox.shell("true")
            await sandbox.stop()

    run(scenario())


@pytest.mark.parametrize("victim", ["watchdog", "fork server", "launcher"])
def test_a_dead_fork_server_is_an_error_and_then_replaced(run: Callable, victim: str) -> None:
    async def scenario() -> None:
        backend = BubblewrapBackend("replaced", python=False)
        sandbox = await backend.start({}, SandboxLimits())
        watchdog = psutil.Process(backend._server.watchdog)
        [server] = watchdog.children()
        launcher = min(server.children(), key=psutil.Process.create_time)
        assert launcher.name() != "bwrap"
        {"watchdog": watchdog, "fork server": server, "launcher": launcher}[victim].kill()
        with pytest.raises(SandboxError):
            await sandbox.shell("sleep 5")
        await asyncio.sleep(0.1)
        second = await backend.start({}, SandboxLimits())
        assert (await second.shell("echo 1")).output == b"1\n"
        await sandbox.stop()
        await backend.close()

    run(scenario())


def test_check_finds_that_sandboxes_start_here(backend: BubblewrapBackend) -> None:
    findings = {finding.name: finding for finding in backend.check()}
    assert findings["sandbox"].ok
    assert findings["user namespaces"].ok


def test_check_works_inside_a_running_loop(backend: BubblewrapBackend, run: Callable) -> None:
    async def scenario() -> bool:
        return all(finding.ok for finding in backend.check() if finding.required)

    assert run(scenario())


def test_check_tries_what_the_run_will_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders and its network are the sandbox's that is tried."""

    def tried(backend: BubblewrapBackend) -> tuple[bool, str]:
        [found] = [finding for finding in backend.check() if finding.name == "sandbox"]
        return found.ok, found.detail

    there, gone = tmp_path / "agent", tmp_path / "gone"
    there.mkdir()
    assert tried(BubblewrapBackend("trial", python=False, folders=[f"{there}:/opt/agent"]))[0]
    ok, said = tried(BubblewrapBackend("trial", python=False, folders=[f"{there}:/opt/agent", str(gone)]))
    assert not ok and f"folders={str(gone)!r}: no such folder on this machine" in said
    monkeypatch.setenv("EGRESS_VENV", str(gone))
    ok, said = tried(
        BubblewrapBackend("trial", python=False, egress={"rules": [{"host": "pypi.org"}]}, run_dir=str(tmp_path))
    )
    assert not ok and "egress is configured, but there is no mitmproxy" in said
