"""One bubblewrap backend and one event loop for a module's tests."""

from __future__ import annotations

import asyncio

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner):
    backend = BubblewrapBackend("test")
    yield backend
    runner.run(backend.close())
