"""Hostile programs in Docker sandboxes, one after the other: calls end in time, engine and host stay as they were."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from composer.contract import SandboxLimits
from envs.sandbox.docker import DockerBackend
from tests.integration.envs.sandbox.hostile_run import COUNT, Report, attack_all

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(240 + 8 * COUNT)]

MORE_FDS = 30
"""Fewer than one a program."""


@dataclass(frozen=True)
class Daemon:
    """The engine's process, as far as it can be seen from here: -1 where it cannot."""

    num_fds: int
    num_threads: int
    resident_bytes: int

    @classmethod
    def look(cls, address: str) -> Daemon:
        if not address.startswith("unix://"):
            return cls(-1, -1, -1)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address.removeprefix("unix://"))
            size = struct.calcsize("3i")
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        process = psutil.Process(pid)
        try:
            return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)
        except psutil.Error:  # another user's
            return cls(-1, -1, -1)


def processes_of(containers: set[str]) -> list[str]:
    """Processes on this machine that are in a control group of these containers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            groups = (path / "cgroup").read_text()
            if any(container in groups for container in containers):
                found.append((path / "comm").read_text().strip())
        except OSError:
            continue
    return found


def test_hostile_programs_leave_host_and_engine_healthy(
    docker_engine: str, docker_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = docker.APIClient(docker_engine)
    containers: set[str] = set()

    async def scenario() -> Report:
        backend = DockerBackend("hostile", docker_image, host=docker_engine)
        try:
            witness = await backend.start({}, SandboxLimits(lifetime_s=3600))
            await witness.shell("COUNT=7")
            report = await attack_all(
                backend, witness, lambda sandbox: containers.add(client.inspect_container(sandbox.name)["Id"])
            )
            left = client.containers(all=True, filters={"name": "composer-hostile"})
            assert len(left) == 1, left  # the witness
            return report
        finally:
            await backend.close()

    client.ping()
    before = Daemon.look(docker_engine)
    report = asyncio.run(scenario())
    deadline = time.monotonic() + 20
    while (left := processes_of(containers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    # The engine lets go of streams some time after their containers have gone.
    while Daemon.look(docker_engine).num_fds > before.num_fds + MORE_FDS and time.monotonic() < deadline:
        time.sleep(0.2)
    began = time.monotonic()
    client.ping()
    answered = time.monotonic() - began
    assert not client.containers(all=True, filters={"name": "composer-hostile"})
    client.close()
    after = Daemon.look(docker_engine)
    with capsys.disabled():
        print(f"\n{report}; the engine {before} -> {after}")
        for line in report.lost[:20]:
            print("   lost:", line[:200])
    report.check()
    assert answered < 2
    assert not left
    assert after.num_fds <= before.num_fds + MORE_FDS
    assert after.num_threads <= before.num_threads + 100  # which Go keeps for the next time that many are needed
    assert after.resident_bytes <= before.resident_bytes + 200 * 2**20
