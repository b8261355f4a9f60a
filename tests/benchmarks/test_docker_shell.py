"""How many commands a second a Docker sandbox's open shell takes, beside one `docker exec` for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from composer.contract import SandboxLimits
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.sandbox import DockerSandbox
from tests.integration.envs.conftest import small_docker_image  # noqa: F401

pytestmark = pytest.mark.docker

COMMANDS, EXECS, STARTS = 300, 10, 5
LEAST = 10
"""Times as many."""


def test_a_command_in_the_shell_costs_a_tenth_of_an_exec(
    docker_engine: str,
    small_docker_image: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> dict[str, float]:
        backend = DockerBackend("benchmark", small_docker_image, host=docker_engine)
        try:
            await (await backend.start({}, SandboxLimits())).stop()  # the image is made
            sandbox = await backend.start({"f": b"x" * 1000}, SandboxLimits())
            await sandbox.shell("true")
            found: dict[str, float] = {}

            async def measure(what: str, count: int, call: Callable) -> None:
                began = time.perf_counter()
                for _ in range(count):
                    await call()
                found[what] = count / (time.perf_counter() - began)

            await measure("sandboxes started", STARTS, lambda: started(backend))
            await measure("forks", STARTS, lambda: forked(sandbox))
            await measure("execs", EXECS, lambda: sandbox.exec(["true"]))
            await measure("commands", COMMANDS, lambda: sandbox.shell("true"))
            await measure("programs in the shell", COMMANDS, lambda: sandbox.shell("/usr/bin/true"))
            await measure("reads", COMMANDS, lambda: sandbox.read("f"))
            await measure("writes", COMMANDS, lambda: sandbox.write("f", b"x" * 1000))
            await measure("collections", 20, sandbox.files)
            await measure("snapshots", 20, lambda: drop(backend, sandbox))
            return found
        finally:
            await backend.close()

    async def started(backend: DockerBackend) -> None:
        await (await backend.start({"f": b"x" * 1000}, SandboxLimits())).stop()

    async def forked(sandbox: DockerSandbox) -> None:
        await (await sandbox.fork()).stop()

    async def drop(backend: DockerBackend, sandbox: DockerSandbox) -> None:
        await backend.drop(await sandbox.snapshot())

    found = asyncio.run(scenario())
    with capsys.disabled():
        print("\nDocker, a second: " + ", ".join(f"{rate:,.1f} {what}" for what, rate in found.items()))
    assert found["commands"] > LEAST * found["execs"]
