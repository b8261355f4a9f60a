"""Which part may know which: every module has its floor, and the command loads nothing heavy."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "torchtitan", "vllm", "ray", "mlflow", "transformers", "matplotlib", "pandas", "numpy")


def test_every_module_has_a_floor() -> None:
    """import-linter checks the floors; a module that stands on none would escape it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {m.strip() for floor in contracts[0]["layers"] for m in floor.split(":")}
    there = {f"composer.{p.stem}" for p in (ROOT / "composer").glob("*.py") if p.stem != "__init__"}
    there |= {f"composer.{p.parent.name}" for p in (ROOT / "composer").glob("*/__init__.py")} - {"composer.conf"}
    assert there | {"envs", "launchers"} == named


@pytest.mark.parametrize(
    "code",
    [
        "import composer.cli",
        "from composer.cli import main; assert main(['plan']) == 0",
        "from composer.cli import main; assert main(['plan', '+experiment=composer2']) == 0",
        "from composer.cli import main; assert main(['--cfg', 'job']) == 0",
    ],
)
def test_the_command_loads_nothing_heavy(code: str, tmp_path: Path) -> None:
    ask = f"import json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == []
    assert not list(tmp_path.iterdir())
