"""Chats over a small tokenizer."""

from __future__ import annotations

import pytest

from composer.rollout.chat import Chat
from tests.unit.rollout.stand_in import small_tokenizer


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(small_tokenizer("hermes", ["a shell runs a command and says what it has said"] * 20))
