"""Images for tests that want Docker."""

from __future__ import annotations

import pytest


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
