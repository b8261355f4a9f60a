"""Runs the pipeline on real sandboxes against a scripted endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer.autoinstall.pipeline import Machinery, Result, autoinstall
from composer.autoinstall.record import Output
from composer.contract import SandboxBackend, SandboxLimits
from composer.schema import AutoinstallConfig, InstallAgentConfig
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tools.files import ReadFile, WriteFile
from envs.tools.grep import Grep
from envs.tools.listing import Glob, ListDir
from envs.tools.shell import Run
from tests.integration.autoinstall.scripted_endpoint import ScriptedEndpoint

LIMITS = SandboxLimits(
    memory_bytes=2**30,
    num_processes=128,
    disk_bytes=2**29,
    exec_timeout_s=60.0,
    lifetime_s=240.0,
    output_bytes=2**22,
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner: asyncio.Runner) -> Iterator[SandboxBackend]:
    backend = BubblewrapBackend("test-autoinstall")
    yield backend
    runner.run(backend.close())


class Pipeline:
    """The pipeline with a backend and an output of the test's own."""

    def __init__(self, runner: asyncio.Runner, backend: SandboxBackend, folder: Path) -> None:
        self.runner, self.backend, self.folder = runner, backend, folder
        self.endpoint: ScriptedEndpoint
        self.progress: list[str] = []

    def run(self, source: Path | str, scripts: dict[str, Any], **changes: Any) -> Result:
        """One repository."""
        says_so = changes.pop("says_so", True)
        agent = changes.pop("agent", {})
        self.endpoint = ScriptedEndpoint(scripts, says_so=says_so)
        settings = {"num_commands": 3, "request_timeout_s": 5.0, "outage_timeout_s": 2.0, "command_timeout_s": 60.0}
        with self.endpoint.serving() as endpoint, Output(self.folder).opened() as output:
            agents = {
                a: InstallAgentConfig(url=endpoint.url(a), model="script", **agent) for a in ("proposer", "installer")
            }
            config = AutoinstallConfig(**{**settings, **changes}, **agents)
            looking = [ReadFile(numbered=True), ListDir(), Glob(), Grep()]
            tools = {"proposer": looking, "installer": [*looking, WriteFile(), Run(60.0, name="shell")]}
            machinery = Machinery(config, 0, self.backend, "the test's", LIMITS, tools, output)
            return self.runner.run(asyncio.wait_for(autoinstall(str(source), machinery, self.progress.append), 240))

    def record(self, result: Result) -> dict[str, Any]:
        return yaml.safe_load((self.environment(result) / "environment.yaml").read_text())

    def environment(self, result: Result) -> Path:
        return self.folder / str(result.ended) / result.name


@pytest.fixture
def pipeline(runner: asyncio.Runner, backend: SandboxBackend, tmp_path: Path) -> Callable[..., Any]:
    return Pipeline(runner, backend, tmp_path / "environments")


def sandboxes(backend: Any) -> int:
    """How many are alive."""
    return len(backend._sandboxes)
