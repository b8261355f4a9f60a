"""The checks that CONTRIBUTING names, as tests: style, formatting, types, and which package may import which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = {
    "style": ["ruff", "check"],
    "formatting": ["ruff", "format", "--check"],
    "types": ["basedpyright"],
    "imports": ["lint-imports"],
}


@pytest.mark.parametrize("command", CHECKS.values(), ids=CHECKS.keys())
def test_check_passes(command: list[str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, f"`{' '.join(command)}` says:\n{(result.stdout + result.stderr)[-6000:]}"
