"""What may break with the next torchtitan stands in one file."""

import ast
from pathlib import Path

import composer

PUBLIC = (
    "torchtitan.trainer",
    "torchtitan.config",
    "torchtitan.components",
    "torchtitan.protocols",
    "torchtitan.distributed",
)
ROOT = Path(composer.__file__).parent


def imports(path: Path) -> list[str]:
    """Full names of everything a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_only_titan_imports_torchtitans_internals() -> None:
    inner = {}
    for path in ROOT.rglob("*.py"):
        names = [n for n in imports(path) if n.split(".")[0] == "torchtitan"]
        hidden = [n for n in names if not n.startswith(PUBLIC) or any(part.startswith("_") for part in n.split("."))]
        if hidden:
            inner[path.relative_to(ROOT).as_posix()] = hidden
    assert list(inner) == ["models/titan.py"]


def test_pure_parts_are_free_of_torch() -> None:
    for name in (
        "models/sizes.py",
        "models/base.py",
        "pretrain/packing.py",
        "pretrain/mix.py",
        "pretrain/sources.py",
        "pretrain/batches.py",
    ):
        assert not {n.split(".")[0] for n in imports(ROOT / name)} & {"torch", "torchtitan", "transformers", "numpy"}
