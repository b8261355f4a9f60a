"""What may break with the next torchtitan stands in three files, what may break with the next vLLM in one."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
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
TITAN = {"models/titan.py", "models/titan_experts.py", "models/titan_layers.py"}
PRIVATE_PARTS = TITAN | {"rollout/vllm_internals.py", "models/cpu.py"}  # the last one: of torch, for a mask
NEAR_THEM = ("models", "rl", "pretrain", "rollout", "weight_sync")
"""Packages that hold objects of torchtitan, torch or vLLM."""


def imports(path: Path) -> list[str]:
    """Full names of everything a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_[^_]", name) is not None


def own_names(tree: ast.Module) -> set[str]:
    """What a file itself defines: functions, classes, variables, and attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def used_names(tree: ast.Module) -> Iterator[str]:
    """Private attributes that a file reads or sets, also by getattr; those of standard modules are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in sys.stdlib_module_names:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value


def foreign_privates(source: str, ours: set[str]) -> set[str]:
    """Private attributes in a file that none of our files defines."""
    return set(used_names(ast.parse(source))) - ours


def source_of(module: str) -> str:
    """The source of an installed module, or of all of a package, found without importing it."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return "\n".join(f.read_text() for f in files)


def overridden_privates(source: str) -> set[str]:
    """Private names in classes derived from torchtitan's or vLLM's that the file of the base class knows too."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("torchtitan", "vllm")
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if module := modules.get(ast.unparse(base)):
                known = set(re.findall(r"\b_[^\W_]\w*", source_of(module)))
                body = ast.Module(node.body, [])
                found |= {n for n in own_names(body) if is_private(n)} & known
    return found


def test_only_titan_imports_torchtitans_internals() -> None:
    inner = set()
    for path in ROOT.rglob("*.py"):
        names = [n for n in imports(path) if n.split(".")[0] == "torchtitan"]
        if any(not n.startswith(PUBLIC) or any(part.startswith("_") for part in n.split(".")) for n in names):
            inner.add(path.relative_to(ROOT).as_posix())
    assert inner <= TITAN


def test_private_parts_are_touched_in_the_files_that_say_so() -> None:
    sources = {p.relative_to(ROOT).as_posix(): p.read_text() for p in ROOT.rglob("*.py")}
    ours = set().union(*(own_names(ast.parse(s)) for s in sources.values()))
    near = {name: s for name, s in sources.items() if name.split("/")[0] in NEAR_THEM or name == "workers.py"}
    assert {n for n, s in near.items() if foreign_privates(s, ours)} == PRIVATE_PARTS
    assert {n: found for n, s in near.items() if n not in TITAN and (found := overridden_privates(s))} == {}


def test_the_search_finds_what_it_is_for() -> None:
    assert foreign_privates("model._skip_lm_head; os._exit(1); self._mine; getattr(x, '_y', 0)", {"_mine"}) == {
        "_skip_lm_head",
        "_y",
    }
    derived = "from torchtitan.trainer import Trainer\nclass Ours(Trainer):\n    def {}(self): ...\n"
    assert overridden_privates(derived.format("_forward_backward_body")) == {"_forward_backward_body"}
    assert overridden_privates(derived.format("_ours_alone")) == set()


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
