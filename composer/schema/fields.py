"""What fields of all config groups are made of: ranges, texts, and a class by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# Far beyond what anybody runs, and within what the libraries below take: a number above was mistyped.
COUNT = 10**6
STEPS = 10**9
LENGTH = 10**8
"""Tokens of one sequence or micro-batch; vLLM's positions are 32-bit."""
TOKENS = 10**15
BYTES = 2**50
LEAST_SECONDS = 0.05
"""No process starts and no server answers in less."""
SECONDS = 1e9
"""threading refuses to wait longer than 9.2e9 s."""
LARGE = 1e30
"""A float32 ends at 3.4e38."""


def number(default: float, minimum: float | None = None, maximum: float = COUNT, *, above: float | None = None) -> Any:
    """A numeric field with its range: inclusive `minimum` and `maximum`, exclusive `above`."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum, "above": above})


def text(default: Any = MISSING, *, may_be_empty: bool = False, plain: bool = False) -> Any:
    """A text field. An empty text is refused unless it `may_be_empty`; a `plain` one can be part of a file's name."""
    return field(default=default, metadata={"may_be_empty": may_be_empty, "plain": plain})


@dataclass(frozen=True)
class TargetConfig:
    """A class by name and its arguments; `instantiate.py` allows prefixes envs., launchers. and those in `plugins`."""

    _target_: str = MISSING
    """`package.module.Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""
