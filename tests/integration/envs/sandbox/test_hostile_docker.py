"""Hostile programs one after the other in Docker sandboxes: calls end in time, and engine and host stay as they were.

`COMPOSER_HOSTILE_PROGRAMS=500` runs so many.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import docker
import psutil
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.sandbox import DockerSandbox
from tests.integration.envs.sandbox.hostile_programs import DEADLINE_S, HostileProgram, hostile_programs

COUNT = int(os.environ.get("COMPOSER_HOSTILE_PROGRAMS", "40"))
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(240 + 8 * COUNT)]

IN_ONE = 5
"""Programs that a sandbox has to bear."""
LONGEST_S = 30.0
"""From the start of a program to the answer of the next command: its deadline, killing it, and a new shell."""
MORE_FDS = 30
"""Fewer than one a program."""
LIMITS = SandboxLimits(
    memory_bytes=128 * 2**20, num_processes=64, file_bytes=32 * 2**20, disk_bytes=32 * 2**20, cpu_seconds=5
)


@dataclass
class Report:
    """What happened."""

    seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    containers: set[str] = field(default_factory=set)


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


async def attack(sandbox: DockerSandbox, program: HostileProgram, report: Report) -> bool:
    """Run one program; false if the sandbox was lost, which is then what every call says."""
    began = time.monotonic()
    try:
        result = await sandbox.shell(program.command, timeout_s=DEADLINE_S)
        assert len(result.output) <= LIMITS.output_bytes + 200
        answer = await sandbox.exec(["/bin/echo", "there"])
        assert answer.exit_code in (0, 126, 127, 137) or b"there" in answer.output, (program, answer)
        await sandbox.read("main.py")
    except FileNotFoundError:
        pass  # it was deleted
    except PermissionError:
        pass  # or closed
    except SandboxError as error:
        report.lost.append(f"{program.name}: {error}")
        return False
    finally:
        seconds = time.monotonic() - began
        report.seconds.append(seconds)
        if seconds > LONGEST_S:
            report.slow.append(f"{program.name}: {seconds:.1f} s")
    return True


async def attack_all(backend: DockerBackend, witness: DockerSandbox, client: docker.APIClient) -> Report:
    report = Report()
    sandbox, uses = None, 0
    for number, program in enumerate(hostile_programs(COUNT)):
        if sandbox is None:
            sandbox, uses = await backend.start({"main.py": b"x = 1\n"}, LIMITS), 0
            report.containers.add(client.inspect_container(sandbox.name)["Id"])
        uses += 1
        is_there = await attack(sandbox, program, report)
        if not is_there or uses == IN_ONE or number == COUNT - 1:
            await sandbox.stop()
            sandbox = None
        assert (await witness.shell("echo $COUNT")).output == b"7\n", f"a neighbour was hit by {program}"
    return report


def test_hostile_programs_leave_host_and_engine_healthy(
    docker_engine: str, docker_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = docker.APIClient(docker_engine)

    async def scenario() -> Report:
        backend = DockerBackend("hostile", docker_image, host=docker_engine)
        try:
            witness = await backend.start({}, SandboxLimits(lifetime_s=3600))
            await witness.shell("COUNT=7")
            report = await attack_all(backend, witness, client)
            left = client.containers(all=True, filters={"name": "composer-hostile"})
            assert len(left) == 1, left  # the witness
            return report
        finally:
            await backend.close()

    client.ping()
    before = Daemon.look(docker_engine)
    report = asyncio.run(scenario())
    deadline = time.monotonic() + 20
    while (left := processes_of(report.containers)) and time.monotonic() < deadline:
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
    ordered = sorted(report.seconds)
    with capsys.disabled():
        print(
            f"\n{COUNT} hostile programs in {len(report.containers)} Docker sandboxes, {len(report.lost)} lost: "
            f"median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s; the engine {before} -> {after}"
        )
        for line in report.lost[:20]:
            print("   lost:", line[:200])
    assert not report.slow, report.slow
    # What a program does to its own sandbox is no failure of the machine's.
    assert len(report.lost) <= max(1, COUNT // 50), report.lost
    assert answered < 2
    assert not left
    assert after.num_fds <= before.num_fds + MORE_FDS
    assert after.num_threads <= before.num_threads + 100  # which Go keeps for the next time that many are needed
    assert after.resident_bytes <= before.resident_bytes + 200 * 2**20
