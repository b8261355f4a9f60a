"""An engine that is restarted, whose disk is full, that is slow, or that somebody else tidies up meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import DockerBackend
from tests.conftest import REPO

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SCRIPT = REPO / ".ci" / "docker.sh"
DISK_BYTES = 96 * 2**20
MANY = 30
OWNER = f"""
import asyncio, sys
from composer.contract import SandboxLimits
from envs.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend("many", sys.argv[2], host=sys.argv[1])
    await asyncio.gather(*(backend.start({{}}, SandboxLimits()) for _ in range({MANY})))
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


class OwnEngine:
    """An engine on a small disk of its own, which may be killed and filled up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "composer-test", folder], check=True)
        self.address = self.start()

    def start(self) -> str:
        started = subprocess.run([SCRIPT, "start", self.folder], capture_output=True, text=True, timeout=120)
        assert started.returncode == 0, started.stderr
        return started.stdout.strip()

    def kill(self) -> None:
        os.kill(int((self.folder / "dockerd.pid").read_text()), signal.SIGKILL)

    def fill(self) -> None:
        # Unbuffered: what did not fit would be tried again when the file is closed.
        with (self.folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))

    def empty(self) -> None:
        (self.folder / "ballast").unlink()

    def stop(self) -> None:
        subprocess.run([SCRIPT, "stop", self.folder], timeout=120, capture_output=True)
        subprocess.run(["umount", "-l", self.folder], check=True)
        self.folder.rmdir()


@pytest.fixture(scope="module")
def own_engine(docker_engine: str) -> Iterator[OwnEngine]:
    if os.geteuid() != 0:
        pytest.skip("starting another engine needs root")
    engine = OwnEngine(Path(tempfile.gettempdir()) / f"composer-own.{os.getpid()}")
    yield engine
    engine.stop()


@pytest.fixture
def backend(run: Callable, own_engine: OwnEngine, small_docker_image: str) -> Iterator[DockerBackend]:
    backend = DockerBackend("trouble", small_docker_image, host=own_engine.address, answer_s=5.0)
    yield backend
    run(backend.close())


async def works(backend: DockerBackend) -> None:
    sandbox = await backend.start({"f": b"1"}, SandboxLimits())
    assert (await sandbox.shell("cat f")).output == b"1"
    await sandbox.stop()


def test_an_engine_that_is_killed_and_comes_back(backend: DockerBackend, run: Callable, own_engine: OwnEngine) -> None:
    sandbox = run(backend.start({}, SandboxLimits()))

    async def scenario() -> None:
        running = asyncio.ensure_future(sandbox.shell("sleep 30"))
        await asyncio.sleep(0.5)
        own_engine.kill()
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxStartError, match="no engine runs there|did not"):
            await backend.start({}, SandboxLimits())

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began < 25
    own_engine.start()
    run(works(backend))
    run(sandbox.stop())


def test_a_full_disk_is_one_plain_sentence(
    backend: DockerBackend, run: Callable, own_engine: OwnEngine, docker_image: str
) -> None:
    run(works(backend))
    sandbox = run(backend.start({}, SandboxLimits()))
    run(sandbox.shell("true"))  # to open a shell, the engine writes to its disk
    own_engine.fill()
    try:
        # One whose shell is open does not need it.
        assert run(sandbox.shell("echo there >f; cat f")).output == b"there\n"
        with pytest.raises(SandboxStartError, match="space") as error:
            run(backend.start({}, SandboxLimits(), image=docker_image))
        assert "\n" not in str(error.value)
    finally:
        own_engine.empty()
    run(works(backend))
    run(sandbox.stop())


def test_somebody_else_removes_what_nothing_uses(backend: DockerBackend, run: Callable, own_engine: OwnEngine) -> None:
    client = docker.APIClient(own_engine.address)

    async def scenario() -> None:
        await works(backend)
        sandbox = await backend.start({"f": b"2"}, SandboxLimits())

        def tidy_up() -> None:
            client.prune_containers()
            client.prune_images({"dangling": False})

        await asyncio.to_thread(tidy_up)
        assert (await sandbox.shell("cat f")).output == b"2"
        await sandbox.stop()
        await asyncio.to_thread(tidy_up)
        assert not await asyncio.to_thread(client.images)
        await works(backend)  # the image is made again
        # While many start: each does, or says why not.
        starts = [asyncio.ensure_future(works(backend)) for _ in range(4)]
        while not all(start.done() for start in starts):
            await asyncio.to_thread(client.prune_containers)
            await asyncio.sleep(0.05)
        errors = [start.exception() for start in starts if start.exception()]
        assert all(isinstance(error, SandboxStartError) for error in errors), errors
        assert len(errors) < len(starts)

    run(scenario())
    client.close()


def test_an_engine_that_is_stopped_in_a_start_blocks_nobody_and_keeps_nothing(
    backend: DockerBackend, run: Callable, own_engine: OwnEngine, small_docker_image: str
) -> None:
    client = docker.APIClient(own_engine.address)
    hasty = DockerBackend("hasty", small_docker_image, host=own_engine.address, answer_s=0.5)
    pid = int((own_engine.folder / "dockerd.pid").read_text())

    async def scenario() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        await works(backend)
        await works(hasty)
        ticking = asyncio.ensure_future(tick())
        starting = asyncio.ensure_future(hasty.start({}, SandboxLimits()))
        await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(SandboxStartError, match="did not start a container within"):
                await starting
            await hasty.close()
        finally:
            os.kill(pid, signal.SIGCONT)
            ticking.cancel()
        return ticks

    assert run(scenario()) >= 20
    deadline = time.monotonic() + 15

    def left() -> list[str]:
        return [name for c in client.containers(all=True) for name in c["Names"] if "composer-hasty" in name]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()
    client.close()


def test_a_run_that_is_terminated_with_many_sandboxes_is_swept(
    run: Callable, docker_engine: str, small_docker_image: str
) -> None:
    client = docker.APIClient(docker_engine)
    backend = DockerBackend("sweeper", small_docker_image, host=docker_engine)

    def left() -> int:
        return len(client.containers(all=True, filters={"name": "composer-many-"}))

    backend.sweep()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, docker_engine, small_docker_image], cwd=REPO, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert left() == MANY
        process.terminate()
        process.wait()
        assert backend.sweep() == MANY
        assert left() == 0
    finally:
        process.kill()
        process.wait()
        run(backend.close())
        client.close()
