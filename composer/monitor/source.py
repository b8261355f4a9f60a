"""Python's own view of code that an agent wrote."""

from __future__ import annotations

import ast
import warnings


def parse(text: str) -> ast.Module | None:
    """The code's tree; None for what is no code. Says nothing of its style."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
