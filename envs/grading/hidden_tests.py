"""What a task's hidden tests say about themselves, read from their source before anything runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from composer.errors import TaskError
from composer.types import Task

PROXY = "composer_solution"
"""The module by which hidden tests reach a solution that runs elsewhere."""


def expected_tests(task: Task) -> set[str]:
    """Node ids, without parameters, of all test functions in the hidden tests.

    Raises:
        TaskError: there is none, or a file is no Python.
    """
    names: set[str] = set()
    for path, tree in _sources(task):
        names |= {f"{path}::{name}" for name in _test_names(tree)}
    if not names:
        raise TaskError(f"The hidden tests of task {task.id} hold no test function: {', '.join(task.hidden_tests)}.")
    return names


def runs_apart(task: Task) -> bool:
    """Whether the hidden tests reach the solution through `composer_solution`, and so need none of its files.

    Raises:
        TaskError: a file is no Python.
    """
    return any(PROXY in _imported(tree) for _, tree in _sources(task))


def test_paths(task: Task) -> list[str]:
    """The files to name on pytest's command line."""
    return sorted(p for p in task.hidden_tests if p.endswith(".py") and PurePosixPath(p).name != "conftest.py")


def _sources(task: Task) -> Iterator[tuple[str, ast.Module]]:
    for path, content in task.hidden_tests.items():
        if not path.endswith(".py"):
            continue
        try:
            yield path, ast.parse(content)
        except (SyntaxError, ValueError) as error:
            raise TaskError(f"The hidden test {path} of task {task.id} is no Python: {error}.") from None


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return names


def _test_names(tree: ast.Module | ast.ClassDef) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and (
            node.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in node.bases)
        ):
            names |= {f"{node.name}::{name}" for name in _test_names(node)}
    return names
