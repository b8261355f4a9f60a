"""The command line imports the record and the sweep's callback: neither may load what is heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("mlflow", "matplotlib", "pandas", "torch", "ray", "vllm", "rich")


def test_importing_the_record_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "import composer.tracking.mlflow, composer.tracking.console, composer.tracking.plots, composer.tracking.sweep\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
