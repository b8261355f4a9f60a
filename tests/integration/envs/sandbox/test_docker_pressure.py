"""The pressure by which sandboxes of a remote engine wait is that of its machine, read by a container there.

The engine of the tests runs on this machine, and is taken for a remote one; so what it is to say is known.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator

import docker
import psutil
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from composer.rollout.pool import PoolSettings, SandboxPool
from composer.rollout.pressure import PressureLimits
from composer.types import Pressure
from envs.sandbox.docker import DockerBackend, pressure

pytestmark = pytest.mark.docker
GIB = 2**30


@pytest.fixture
def backend(
    run: Callable, docker_engine: str, small_docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DockerBackend]:
    monkeypatch.setattr(pressure, "is_here", lambda address, info: False)
    backend = DockerBackend("pressure", small_docker_image, host=docker_engine)
    yield backend
    run(backend.close())


def test_an_engine_on_this_machine_is_known_as_such(run: Callable, docker_engine: str, small_docker_image: str) -> None:
    backend = DockerBackend("pressure", small_docker_image, host=docker_engine)
    assert run(backend.pressure()) is None
    assert not backend._sandboxes  # nothing was started for it
    run(backend.close())


def test_a_container_tells_what_its_machine_has_left(
    run: Callable, backend: DockerBackend, docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this process could see by itself is not looked at.
    monkeypatch.setattr("composer.rollout.pressure.read", lambda: pytest.fail("the wrong machine was looked at"))
    now = run(backend.pressure())
    assert now.memory_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.25)
    assert 0 < now.runnable_per_cpu < 1000
    root = docker.APIClient(docker_engine).info()["DockerRootDir"]
    assert now.disk_bytes == pytest.approx(shutil.disk_usage(root).free, abs=2 * GIB)
    assert run(backend.pressure()) is now  # for a second


def test_starts_wait_for_it(run: Callable, backend: DockerBackend) -> None:
    async def play() -> str:
        limits = PressureLimits(runnable_per_cpu=1e9, memory_bytes=2**60, disk_bytes=0)
        pool = SandboxPool(backend, PoolSettings(warm=0, wait_s=0.5, pressure=limits))
        await pool.start({}, SandboxLimits())
        with pytest.raises(SandboxStartError) as error:
            await pool.start({}, SandboxLimits())
        return str(error.value)

    left = re.search(r"pressed \((\d+\.\d) GiB of memory left", run(play()))
    assert left and float(left[1]) == pytest.approx(psutil.virtual_memory().available / GIB, rel=0.25)


def test_without_an_answer_nothing_is_known_and_later_again(
    run: Callable, backend: DockerBackend, docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "_FRESH_S", 0.0)
    monkeypatch.setattr(pressure, "_AGAIN_S", 0.0)
    assert run(backend.pressure()).memory_bytes
    [probe] = backend._sandboxes
    client = docker.APIClient(docker_engine)
    client.remove_container(probe, force=True)
    assert run(backend.pressure()) == Pressure(None, None, None)
    assert run(backend.pressure()).memory_bytes
    [another] = backend._sandboxes
    run(backend.close())
    assert another not in {name.strip("/") for c in client.containers(all=True) for name in c["Names"]}
    client.close()


def test_doctor_says_what_is_known(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    [seen] = [finding for finding in backend.check() if finding.name == "pressure"]
    assert seen.ok and not seen.required
    assert seen.detail == "new sandboxes wait for the engine's machine by its runnable threads, free memory, free disk"
    # As where a runtime shows containers a machine of its own.
    real = pressure.pressure_of
    monkeypatch.setattr(
        pressure, "pressure_of", lambda memory, threads, disk, info: real(memory, threads, disk, {"MemTotal": 1})
    )
    [seen] = [finding for finding in backend.check() if finding.name == "pressure"]
    assert seen.detail == (
        "new sandboxes wait for the engine's machine by its free disk; not known, and so never waited for: "
        "runnable threads, free memory"
    )


def test_many_who_ask_at_once_are_answered_by_one_container(run: Callable, backend: DockerBackend) -> None:
    async def play() -> list[Pressure | None]:
        return await asyncio.gather(*(backend.pressure() for _ in range(8)))

    assert len(set(run(play()))) == 1
    assert len(backend._sandboxes) == 1
