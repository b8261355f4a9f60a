"""What is kept of an episode, through the wrapper that a harness makes for every call."""

from __future__ import annotations

import gc
from typing import Any, cast

from composer.contract import Sandbox
from envs.tools.episode import EpisodeState, unwrapped


class Place:
    """Stands for a sandbox."""


class Wrapper:
    """As of a harness: a new one for every call."""

    def __init__(self, inner: Any) -> None:
        self.unwrapped = inner


def test_a_value_outlives_the_wrapper_and_not_the_sandbox() -> None:
    state: EpisodeState[list[int]] = EpisodeState(list)
    inner = Place()
    state.of(cast("Sandbox", Wrapper(inner))).append(1)
    gc.collect()
    assert state.of(cast("Sandbox", Wrapper(inner))) == [1]
    assert state.of(cast("Sandbox", inner)) == [1]
    assert unwrapped(cast("Sandbox", Wrapper(inner))) is inner
    del inner
    gc.collect()
    assert len(state) == 0
