"""Write `.ci/constraints.txt`: what pip resolves today from pyproject.toml alone. Run by `make lock`.

pip resolves without installing anything; torch is left out, since its CPU and CUDA builds have different versions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """\
# The exact version of every package that the default install was tested with, so that an install next year gives what
# this one gave. `make lock` writes it anew. torch is not here: its version stands in pyproject.toml.
"""


def main() -> None:
    """Resolve and write."""
    target = Path(__file__).with_name("constraints.txt")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run(
            [*pip, "--no-build-isolation", "--report", report, "-e", ".[cpu,dev]", "setuptools<79"],
            check=True,
            cwd=target.parent.parent,
        )
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    lines = sorted(
        (f"{p['name']}=={p['version']}\n" for p in packages if p["name"] not in ("torch", "composer")), key=str.lower
    )
    target.write_text(HEAD + "".join(lines))
    print(f"{target}: {len(lines)} packages")


if __name__ == "__main__":
    main()
