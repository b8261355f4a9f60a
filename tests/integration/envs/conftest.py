"""One bubblewrap backend and one event loop for a module's tests, and images for those that want Docker."""

from __future__ import annotations

import asyncio

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
def docker_image() -> str:
    """An image with Python and pytest, made of this machine's programs."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system()}"


@pytest.fixture(scope="session")
def small_docker_image() -> str:
    """An image with coreutils, tar and a POSIX shell, without bash and Python."""
    from tests.integration.envs.sandbox.docker_image import root_file_system

    return f"tarball:{root_file_system(full=False)}"
