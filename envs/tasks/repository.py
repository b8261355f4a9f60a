"""A Python repository with tests, in a folder: what its library defines, and which of its tests use what.

Nothing of it is run or imported; what a test uses is read from its source: the names in it, and those in the helpers
and fixtures of its file that it leads to.
"""

from __future__ import annotations

import ast
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from composer.errors import ConfigError
from envs.grading.command_grader import Recipe
from envs.tasks.python_source import Definition, FunctionNode, PythonSource, is_library_file, is_test_file, parse_files
from envs.tasks.scrub import read_repository

TEST_COMMAND = "python3 -m pytest -p no:cacheprovider --junitxml={report} {test_files}"
"""Must write a JUnit report to {report}, or print pytest's summary (`-rA`)."""


@dataclass(frozen=True)
class RepositoryTest:
    """A test function or a test method."""

    path: str
    definition: Definition
    names: frozenset[str]
    """All names and attributes that it may use."""
    modules: frozenset[str]
    """What its file imports, dotted: modules, and names with their modules."""


class Repository:
    """The files of a folder."""

    def __init__(self, path: str) -> None:
        """Read them.

        Raises:
            ConfigError: there is no such folder, or it has no Python files or no tests.
            TaskError: it cannot be read, or a link leads out of it.
        """
        if not Path(path).is_dir():
            raise ConfigError("env.taskset.args.path", path, "name the folder of a Python repository")
        self.files = read_repository(Path(path))
        self.test_files = {p: content for p, content in self.files.items() if is_test_file(p)}
        self._imported: dict[tuple[str, str], bool] = {}
        self.library = parse_files(self.files, filter(is_library_file, self.files))
        if not self.library:
            raise ConfigError("env.taskset.args.path", path, "there is no Python file in it that is no test")
        if not self.tests:
            raise ConfigError("env.taskset.args.path", path, "there is no test in it that pytest would find")

    @cached_property
    def test_sources(self) -> dict[str, PythonSource]:
        """The files in which pytest looks for tests."""
        names = {p for p in self.test_files if p.endswith(".py")}
        return parse_files(self.files, sorted(p for p in names if _is_collected(p)))

    @cached_property
    def tests(self) -> list[RepositoryTest]:
        """Every test, in the order of the files."""
        return [test for path, source in self.test_sources.items() for test in _tests(path, source)]

    def recipe(self, command: str = TEST_COMMAND) -> Recipe:
        """How `envs.grading.command_grader` runs all tests; unlike the pytest grader, it minds no skipped ones."""
        return Recipe(
            command=command.replace("{test_files}", shlex.join(self.test_sources)),
            report="junit" if "{report}" in command else "pytest",
        )

    def tests_of(self, path: str, definition: Definition) -> list[RepositoryTest]:
        """The tests that seem to use a definition of a library file: its name, and something of its package."""
        return [test for test in self._tests_by_name.get(definition.node.name, ()) if self._imports(test, path)]

    @cached_property
    def _tests_by_name(self) -> dict[str, list[RepositoryTest]]:
        found: dict[str, list[RepositoryTest]] = defaultdict(list)
        for test in self.tests:
            for name in test.names:
                found[name].append(test)
        return found

    def _imports(self, test: RepositoryTest, path: str) -> bool:
        key = test.path, path
        if key not in self._imported:
            self._imported[key] = any(_is_of(module, path) for module in test.modules)
        return self._imported[key]


def is_test_definition(definition: Definition) -> bool:
    """Whether pytest would take it for a test: `test…`, at the top or in a `Test…` or a `…TestCase`."""
    node = definition.node
    return isinstance(node, FunctionNode) and node.name.startswith("test")


def _is_collected(path: str) -> bool:
    stem = PurePosixPath(path).stem
    return stem.startswith("test_") or stem.endswith("_test")


def _tests(path: str, source: PythonSource) -> Iterator[RepositoryTest]:
    definitions = list(source.definitions())
    uses = {d.name: _names(d.node) for d in definitions if isinstance(d.node, FunctionNode)}
    modules = frozenset(_imports(source.tree))
    aliases = _aliases(source.tree)
    for definition in filter(is_test_definition, definitions):
        # A test's names, and what they lead to in this file: helpers, fixtures, `self.helper`, `setUp`.
        siblings = definition.name.rpartition(".")[0]
        reached, todo = set(), [definition.name, *(f"{siblings}.{n}" for n in ("setUp", "setup_method") if siblings)]
        names: set[str] = set()
        while todo:
            name = todo.pop()
            if name in reached or name not in uses:
                continue
            reached.add(name)
            names |= uses[name]
            todo += [*uses[name], *(f"{siblings}.{used}" for used in uses[name] if siblings)]
        names |= {aliases[name] for name in names & aliases.keys()}
        yield RepositoryTest(path, definition, frozenset(names), modules)


def _names(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            names.add(child.id)
        elif isinstance(child, ast.Attribute):
            names.add(child.attr)
        elif isinstance(child, ast.arg):
            names.add(child.arg)  # a fixture's name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            names |= {alias.name.rpartition(".")[2] for alias in child.names}
    return names


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """`import x as y`, `from m import x as y`: y -> x."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {
        alias.asname: alias.name.rpartition(".")[2]
        for node in imports
        for alias in node.names
        if alias.asname is not None
    }


def _is_of(module: str, path: str) -> bool:
    """Whether an imported name is of the package, or the module, that a file belongs to."""
    package, _, inside = PurePosixPath(path).with_suffix("").as_posix().partition("/")
    if inside and package in ("src", "lib"):
        package = inside.partition("/")[0]
    top, _, rest = module.partition(".")
    own = PurePosixPath(path).stem
    return top in (package, own) or rest.rpartition(".")[2] == own
