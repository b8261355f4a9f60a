"""How fast Docker sandboxes are: commands in their open shell beside one `docker exec` for each, and beside SWE-ReX's
Docker deployment on the same engine, image and commands. In turn, in one run.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import site
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import docker
import pytest

from composer.contract import SandboxLimits
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.sandbox import DockerSandbox
from tests.integration.envs.sandbox.docker_image import libraries

pytestmark = pytest.mark.docker

COMMANDS, EXECS, STARTS = 300, 10, 5
LEAST = 10
"""Times as many commands a second as one `docker exec` for each."""
COMMAND = "ls"


async def rate(count: int, call: Callable[[], Awaitable[object]]) -> float:
    """Calls a second, one after the other."""
    began = time.perf_counter()
    for _ in range(count):
        await call()
    return count / (time.perf_counter() - began)


def test_a_command_in_the_shell_costs_a_tenth_of_an_exec(
    docker_engine: str, small_docker_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> dict[str, float]:
        backend = DockerBackend("benchmark", small_docker_image, host=docker_engine)
        client = docker.APIClient(docker_engine)
        try:
            await (await backend.start({}, SandboxLimits())).stop()  # the image is made
            sandbox = await backend.start({"f": b"x" * 1000}, SandboxLimits())
            await sandbox.shell("true")
            return {
                "sandboxes started": await rate(STARTS, lambda: started(backend)),
                "forks": await rate(STARTS, lambda: forked(sandbox)),
                "execs": await rate(EXECS, lambda: asyncio.to_thread(docker_exec, client, sandbox)),
                "our execs": await rate(EXECS, lambda: sandbox.exec(["true"])),
                "commands": await rate(COMMANDS, lambda: sandbox.shell("true")),
                "programs in the shell": await rate(COMMANDS, lambda: sandbox.shell("/usr/bin/true")),
                "reads": await rate(COMMANDS, lambda: sandbox.read("f")),
                "writes": await rate(COMMANDS, lambda: sandbox.write("f", b"x" * 1000)),
                "collections": await rate(20, sandbox.files),
                "snapshots": await rate(20, lambda: drop(backend, sandbox)),
            }
        finally:
            await backend.close()
            client.close()

    def docker_exec(client: docker.APIClient, sandbox: DockerSandbox) -> None:
        """What `docker exec` asks of the engine."""
        client.exec_start(client.exec_create(sandbox.name, ["true"])["Id"])

    async def started(backend: DockerBackend) -> None:
        await (await backend.start({"f": b"x" * 1000}, SandboxLimits())).stop()

    async def forked(sandbox: DockerSandbox) -> None:
        await (await sandbox.fork()).stop()

    async def drop(backend: DockerBackend, sandbox: DockerSandbox) -> None:
        await backend.drop(await sandbox.snapshot())

    found = asyncio.run(scenario())
    with capsys.disabled():
        print("\nDocker, a second: " + ", ".join(f"{count:,.1f} {what}" for what, count in found.items()))
    assert found["commands"] > LEAST * found["execs"]


async def ours(engine: str, image: str) -> dict[str, float]:
    backend = DockerBackend("benchmark", image, host=engine)
    try:
        await (await backend.start({}, SandboxLimits())).stop()  # the image is made

        async def cycle() -> None:
            sandbox = await backend.start({}, SandboxLimits())
            assert (await sandbox.shell("true")).exit_code == 0
            await sandbox.stop()

        sandbox = await backend.start({}, SandboxLimits())
        await sandbox.shell(COMMAND)
        return {"cycles": await rate(STARTS, cycle), "commands": await rate(100, lambda: sandbox.shell(COMMAND))}
    finally:
        await backend.close()


async def theirs(image: str, folder: Path) -> dict[str, float]:
    """SWE-ReX; its server, and what that needs, are this interpreter's own packages, for reading only.

    The tests' engine has no bridge: its server takes the engine's own loopback, and leaves the port free afterwards.
    """
    from swerex.deployment.docker import DockerDeployment
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.utils.free_port import find_free_port

    pydantic_core = str(importlib.import_module("pydantic_core._pydantic_core").__file__)
    logging.getLogger("rex-deploy").setLevel(logging.CRITICAL)

    async def start() -> DockerDeployment:
        port = find_free_port()
        programs = folder / str(port)
        programs.mkdir()
        server = programs / "swerex-remote"
        # SWE-ReX would install its server where this fails: it never does.
        server.write_text(f'#!/bin/sh\npython3 -m swerex.server --host 127.0.0.1 --port {port} "$@"\nexit 0\n')
        server.chmod(0o755)
        packages = site.getsitepackages()[0]
        deployment = DockerDeployment(
            image=image,
            port=port,
            pull="never",
            docker_args=[
                "--network=host",
                *(f"--volume={os.path.realpath(library)}:{library}:ro" for library in libraries({pydantic_core})),
                f"--volume={packages}:/packages:ro",
                f"--volume={programs}:/programs:ro",
                "--env=PYTHONPATH=/packages",
                "--env=PATH=/programs:/usr/bin:/bin",
            ],
        )
        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=30))
        return deployment

    async def run(deployment: DockerDeployment, command: str) -> None:
        await deployment.runtime.run_in_session(BashAction(command=command, check="silent"))

    async def cycle() -> None:
        deployment = await start()
        await run(deployment, "true")
        await deployment.stop()

    numbers = {"cycles": await rate(2, cycle)}
    deployment = await start()
    try:
        numbers["commands"] = await rate(20, lambda: run(deployment, COMMAND))
    finally:
        await deployment.stop()
    return numbers


@pytest.mark.timeout(300)
def test_beside_swe_rex(
    docker_engine: str,
    docker_image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("swerex", reason="swe-rex is not installed (extra `test`)")
    if shutil.which("docker") is None:
        pytest.skip("SWE-ReX talks to the engine with the program `docker`, which is not installed")
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    client = docker.APIClient(docker_engine)
    name = "composer-benchmark:swe-rex"
    client.import_image_from_file(docker_image.removeprefix("tarball:"), *name.split(":"))
    try:
        other = asyncio.run(theirs(name, tmp_path))
    finally:
        client.remove_image(name, force=True)
        client.close()
    mine = asyncio.run(ours(docker_engine, docker_image))
    with capsys.disabled():
        print(
            f"\nDocker, a second: {mine['cycles']:.2f} cycles (SWE-ReX: {other['cycles']:.2f}), "
            f"{mine['commands']:,.0f} times `{COMMAND}` ({other['commands']:,.1f})"
        )
    assert mine["cycles"] > other["cycles"]
    assert mine["commands"] > LEAST * other["commands"]
