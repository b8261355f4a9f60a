"""A real mitmproxy, real sandboxes of each backend, and a server on this machine in place of the internet."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer.contract import SandboxLimits
from envs.egress import client
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend
from tests.conftest import NO_EGRESS
from tests.integration.envs.egress.upstream import Upstream, serve
from tests.integration.envs.egress.world import HOSTS, SECRET, VARIABLE, egress

Backend = BubblewrapBackend | DockerBackend


@pytest.fixture(scope="session", autouse=True)
def is_installed(request: pytest.FixtureRequest) -> None:
    """The proxy's environment, and a curl for sandboxes."""
    if not client.is_installed():
        request.config.stash[NO_EGRESS] = client.finding(True).detail
        pytest.skip("egress-not-installed: EGRESS=1 make setup")
    if shutil.which("curl") is None:
        request.config.stash[NO_EGRESS] = "there is no curl(1) that sandboxes could run"
        pytest.skip("no curl(1) that sandboxes could run")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with serve(tmp_path_factory.mktemp("upstream"), HOSTS) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def kind(request: pytest.FixtureRequest) -> str:
    """The backend's name."""
    return request.param


@pytest.fixture(scope="module")
def make(kind: str, runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[Callable[..., Backend]]:
    """Makes backends, by label and policy, which are closed with the module."""
    made: list[Backend] = []

    def make(label: str, policy: dict[str, Any] | None, **more: Any) -> Backend:
        more = {"profile": "plain", "egress": policy, **more}
        if kind == "docker":
            image, host = (request.getfixturevalue(name) for name in ("docker_image", "docker_engine"))
            made.append(DockerBackend(label, image, host=host, **more))
        else:
            made.append(BubblewrapBackend(label, **more))
        return made[-1]

    os.environ[VARIABLE] = f"Bearer {SECRET}"
    yield make
    for backend in made:
        runner.run(backend.close())
    del os.environ[VARIABLE]


@pytest.fixture(scope="module")
def backend(make: Callable[..., Backend], upstream: Upstream, log: Path) -> Backend:
    return make("egress", egress(upstream, log), profile="developer")


@pytest.fixture(scope="module")
def sandbox(backend: Backend, runner: asyncio.Runner) -> Any:
    return runner.run(backend.start({}, SandboxLimits(network=True, lifetime_s=900.0)))


@pytest.fixture
def sh(sandbox: Any, runner: asyncio.Runner, upstream: Upstream) -> Callable[..., tuple[int, str]]:
    """Runs a command line in a sandbox with a network; returns exit code and output."""
    upstream.requests.clear()

    def sh(command: str) -> tuple[int, str]:
        result = runner.run(sandbox.shell(command, 30))
        return result.exit_code, result.output.decode(errors="replace")

    return sh
