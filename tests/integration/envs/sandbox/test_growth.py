"""A backend holds as much after many sandboxes as after a few: descriptors, threads, processes, and what those hold."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from composer.contract import SandboxBackend, SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend

LIMITS = SandboxLimits()
ROUNDS = 6
SETTLES_S = 10.0
"""For processes that were killed to be reaped."""


def held() -> Counter[str]:
    """What this process has open, and how many threads and children with how many descriptors."""
    found: Counter[str] = Counter(threads=threading.active_count())
    for link in Path("/proc/self/fd").iterdir():
        try:
            found["own " + str(link.readlink()).partition(":")[0]] += 1
        except OSError:
            continue
    for child in psutil.Process().children(recursive=True):
        try:
            found["descriptors of children"] += child.num_fds()
            found["children"] += 1
        except psutil.Error:
            continue
    return found


async def life(backend: SandboxBackend) -> None:
    """Every way in which a sandbox begins, and some of what is done with it; three that run at once."""
    first = await backend.start({"a": b"1"}, LIMITS)
    await first.exec(["true"])
    await first.shell("cat a > b")
    assert await first.read("b") == b"1"
    snapshot = await first.snapshot()
    second = await first.fork()
    third = await backend.start({}, LIMITS, base=snapshot)
    assert await second.read("b") == await third.read("b") == b"1"
    await asyncio.gather(first.stop(), second.stop(), third.stop())
    await backend.drop(snapshot)


def more(before: Counter[str]) -> Counter[str]:
    """What there is more of by now, once what has been killed is gone."""
    deadline = time.monotonic() + SETTLES_S
    while left := held() - before:
        if time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.1)
    return left


def grown(runner: asyncio.Runner, backend: SandboxBackend) -> Counter[str]:
    for _ in range(2):  # a first one has imports, a fork server, and connections that are kept
        runner.run(life(backend))
    before = held()
    for _ in range(ROUNDS):
        runner.run(life(backend))
    return more(before)


@pytest.mark.timeout(120)
def test_bubblewrap_does_not_grow(runner: asyncio.Runner, backend: SandboxBackend) -> None:
    assert not grown(runner, backend)


@pytest.mark.docker
@pytest.mark.timeout(300)
def test_docker_does_not_grow(runner: asyncio.Runner, docker_engine: str, docker_image: str) -> None:
    # Kept connections are as many as were ever used at once, so they may still become more, by fewer than rounds.
    backend = DockerBackend("growth", docker_image, host=docker_engine)
    try:
        left = grown(runner, backend)
    finally:
        runner.run(backend.close())
    assert left.total() < ROUNDS, left


def test_a_backend_that_is_closed_leaves_nothing_open(runner: asyncio.Runner, backend: SandboxBackend) -> None:
    async def one() -> None:
        other = BubblewrapBackend("growth")
        try:
            await life(other)
        finally:
            await other.close()

    runner.run(one())
    before = held()
    for _ in range(3):
        runner.run(one())
    assert not more(before)
