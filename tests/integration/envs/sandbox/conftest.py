"""A real backend for the sandbox tests; each test gets fresh sandboxes from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend

T = TypeVar("T")


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all tests, since a backend lives on one."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def run(loop: asyncio.AbstractEventLoop) -> Callable[[Awaitable[T]], T]:
    """Runs a coroutine, with a deadline over everything that a test does."""

    def run(awaitable: Awaitable[T]) -> T:
        return loop.run_until_complete(asyncio.wait_for(awaitable, 60))

    return run


@pytest.fixture(scope="session")
def backend(run: Callable) -> Iterator[BubblewrapBackend]:
    """One backend for all tests."""
    backend = BubblewrapBackend("test")
    yield backend
    run(backend.close())
