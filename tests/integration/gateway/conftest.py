"""A chat over a small tokenizer, and an event loop for a module's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from composer.rollout.chat import Chat
from tests.unit.rollout.stand_in import small_tokenizer


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(small_tokenizer("hermes", ["a shell runs a command and says what it has said"] * 20))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner
