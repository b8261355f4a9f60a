"""One bubblewrap backend and one event loop for a module's tests, and a Docker engine for those that want one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner):
    backend = BubblewrapBackend("test")
    yield backend
    runner.run(backend.close())


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The address of a Docker engine: the one that is there, or one of the tests' own."""
    for address in (os.environ.get("DOCKER_HOST"), "unix:///run/docker.sock"):
        if address and _answers(address):
            yield address
            return
    script = Path(__file__).parents[3] / ".ci" / "docker.sh"
    folder = Path(tempfile.gettempdir()) / f"composer-engine.{os.getpid()}"
    started = subprocess.run([script, "start", folder], capture_output=True, text=True, timeout=300)
    try:
        if started.returncode == 3:
            pytest.skip(started.stderr.strip().splitlines()[-1])
        assert started.returncode == 0, started.stderr
        yield started.stdout.strip()
    finally:
        subprocess.run([script, "stop", folder], check=True, timeout=120)


def _answers(address: str) -> bool:
    import docker
    from docker.errors import DockerException

    try:
        client = docker.APIClient(address, timeout=5)
        client.ping()
        client.close()
    except (DockerException, OSError):
        return False
    return True


@pytest.fixture(scope="session")
def docker_image() -> str:
    """An image with Python and pytest, made of this machine's programs."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system()}"


@pytest.fixture(scope="session")
def small_docker_image() -> str:
    """An image with coreutils, tar and a POSIX shell, without bash and Python."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system(full=False)}"
