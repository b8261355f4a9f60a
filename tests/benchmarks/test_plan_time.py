"""How long a plan for a trillion parameters takes, imports and all."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0


def test_a_plan_for_a_trillion_parameters_is_there_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        command = [sys.executable, "-m", "composer", "plan", "+experiment=composer2"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
        if best < LIMIT_S:
            break
    assert best < LIMIT_S
