"""Pages of Python's own documentation, as the Python that runs this carries it: a web for whoever has no other.

What `help()` shows: the topics of the language reference, and the docstrings of the standard library's public modules.
A page's address is where the same is explained on docs.python.org.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from envs.shadow.pages import Page

CORPUS = ":python:"
"""Stands for these pages where otherwise a folder is named."""
_REFERENCE, _LIBRARY = "https://docs.python.org/3/reference/", "https://docs.python.org/3/library/"
_LEFT_OUT = frozenset({"antigravity", "idlelib", "lib2to3", "pydoc_data", "test", "this", "tkinter", "turtledemo"})


def python_pages() -> Iterator[Page]:
    """Every page, in an order that is always the same; none where the standard library has no source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _topics(root / "pydoc_data" / "topics.py")
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if not name.startswith("_"):
            for module, path in _modules(root, name):
                if page := _page(module, path):
                    yield page


def _topics(path: Path) -> Iterator[Page]:
    for node in _parsed(path):
        if isinstance(node, ast.Assign):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                title = next(line.strip() for line in text.splitlines() if line.strip())
                yield Page(f"{_REFERENCE}{topic}.html", title, text)


def _modules(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """A top-level module, or a package and the public modules in it."""
    if (root / f"{name}.py").is_file():
        yield name, root / f"{name}.py"
    elif (root / name / "__init__.py").is_file():
        yield name, root / name / "__init__.py"
        for path in sorted((root / name).glob("[!_]*.py")):
            yield f"{name}.{path.stem}", path


def _page(module: str, path: Path) -> Page | None:
    """The docstrings of a module, of its public classes and their methods, and of its functions."""
    nodes = _parsed(path)
    about = (ast.get_docstring(ast.Module(nodes, [])) or "").strip()
    parts = [about, *(text for node in nodes for text in _described(node, ""))]
    text = "\n\n".join(part for part in parts if part)
    if not text:
        return None
    first = about.splitlines()[0] if about else "standard library"
    return Page(f"{_LIBRARY}{module}.html", f"{module}: {first}", text)


def _described(node: ast.stmt, prefix: str) -> Iterator[str]:
    """A name with its docstring, and those within it."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
        return
    if text := ast.get_docstring(node):
        arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
        yield f"{prefix}{node.name}{arguments}\n\n{text}"
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            yield from _described(inner, f"{node.name}.")


def _parsed(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
