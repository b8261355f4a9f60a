"""Taskset `feature_deletion`: a public function, method or class that tests use is gone and has to be written anew.

Its signature and its docstring stay, its body raises NotImplementedError. The agent's repository lacks the tests that
use it; the hidden tests are all of the repository's tests, so the rest has to stay as it is. Which tests use what is
read from their source: `composer tasks check` shows where that was wrong.

Both graders know these tasks: `PytestGrader` wants every test to run, `CommandGrader` minds no skipped ones.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence

from composer.errors import ConfigError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset
from envs.tasks.python_source import Definition, Edit, FunctionNode, PythonSource
from envs.tasks.repository import TEST_COMMAND, Repository, RepositoryTest, is_test_definition
from envs.tasks.scrub import HISTORIES, setup_command

KINDS = ("function", "method", "class")


class FeatureDeletionTaskset(FiniteTaskset):
    """Tasks `<file>::<name>` of one repository, for example `shop/cart.py::Cart.total`."""

    def __init__(
        self,
        path: str | None = None,
        name: str = "feature_deletion",
        kinds: Sequence[str] = KINDS,
        min_tests: int = 1,
        image: str = "",
        test_command: str = TEST_COMMAND,
        history: str = "base",
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the repository and find its features.

        Args:
            path: the repository's folder; None: there are no tasks yet.
            name: begins the tasks' ids.
            kinds: of features, of `KINDS`.
            min_tests: how many tests must use a feature.
            image: has what the repository needs to run, and gets its files; "": the env's own.
            test_command: how a `CommandGrader` runs all tests; {test_files} and {report} are filled in.
            history: what the image keeps of the repository's, of `envs.tasks.scrub.HISTORIES`.
            evaluation_share: how much of the features is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: it is no repository with tests, none of its features is tested, or another value is refused.
            TaskError: the repository cannot be read.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ConfigError("env.taskset.args.kinds", min(unknown), f"must be some of {', '.join(KINDS)}")
        if min_tests < 1:
            raise ConfigError("env.taskset.args.min_tests", min_tests, "must be at least 1")
        if history not in HISTORIES:
            raise ConfigError("env.taskset.args.history", history, f"must be one of {', '.join(HISTORIES)}")
        self._setup = setup_command(history) if image else ""
        self.name, self.image = name, image
        self._features: dict[str, tuple[str, Definition, list[RepositoryTest]]] = {}
        if path is None:
            absent = "give env.taskset.args.path the folder of a Python repository with tests"
            super().__init__(
                (), evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, absent=absent
            )
            return
        self.repository = Repository(path)
        self._recipe = self.repository.recipe(test_command)
        families = {}
        for file, source in self.repository.library.items():
            for definition in source.definitions():
                key = f"{file}::{definition.name}"
                if key in self._features or not definition.is_public:  # a property and its setter have one name
                    continue
                tests = self.repository.tests_of(file, definition)
                if _kind(definition) in kinds and len(tests) >= min_tests and _stubs(source, definition):
                    self._features[key] = file, definition, tests
                    # A class and its methods share code: they are in one split.
                    families[key] = f"{file}::{definition.top}"
        if not self._features:
            raise ConfigError(
                "env.taskset.args.path",
                path,
                f"its tests use no public {' or '.join(kinds)}; choose another repository",
            )
        super().__init__(
            self._features,
            evaluation_share=evaluation_share,
            seed=seed,
            epochs=epochs,
            checked=checked,
            families=families,
        )

    def reference(self, task: Task) -> dict[str, bytes]:
        """The agent's files with the feature in it.

        Raises:
            TaskError: the task is not of this taskset.
        """
        file, _, _ = self._features[self._key(task)]
        return {**task.files, file: self.repository.files[file]}

    def _make(self, key: str, split: Split) -> Task:
        file, definition, tests = self._features[key]
        source = self.repository.library[file]
        files = dict(self.repository.files)
        files[file] = source.edited(*_stubs(source, definition))
        by_path: dict[str, set[str]] = defaultdict(set)
        for test in tests:
            by_path[test.path].add(test.definition.name)
        for path, names in by_path.items():
            rest = _without_tests(self.repository.test_sources[path], names)
            if rest is None:
                del files[path]
            else:
                files[path] = rest
        return Task(
            id=self._id(key, split),
            request=f"implement {definition.name} in {file}",
            files=files,
            hidden_tests=dict(self.repository.test_files),
            image=self.image,
            setup=self._setup,
            metadata={
                "kind": _kind(definition),
                "file": file,
                "feature": definition.name,
                "tests": [f"{test.path}::{test.definition.name.replace('.', '::')}" for test in tests],
                **self._recipe.to_metadata(),
            },
        )


def _kind(definition: Definition) -> str:
    if isinstance(definition.node, ast.ClassDef):
        return "class"
    return "method" if "." in definition.name else "function"


def _stubs(source: PythonSource, definition: Definition) -> list[Edit]:
    """What takes away the bodies of a feature's functions; nothing if it has none to speak of."""
    edits = []
    for function in _functions(definition.node):
        body = function.body
        has_docstring = (
            isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        )
        body = body[has_docstring:]
        # Declarations of a protocol or an abstract class are no features.
        if body and not all(isinstance(s, ast.Pass | ast.Raise) or _is_ellipsis(s) for s in body):
            start, end = source.span(body[0])[0], source.span(body[-1])[1]
            if decorators := getattr(body[0], "decorator_list", []):
                start = source.content.rindex(b"@", 0, source.span(decorators[0])[0])
            edits.append(Edit(start, end, b"raise NotImplementedError"))
    return edits


def _functions(node: FunctionNode | ast.ClassDef) -> Iterator[FunctionNode]:
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, FunctionNode | ast.ClassDef):
                yield from _functions(child)
    else:
        yield node


def _is_ellipsis(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is Ellipsis
    )


def _without_tests(source: PythonSource, names: set[str]) -> bytes | None:
    """A test file without some of its tests; None if no test is left in it."""
    definitions = list(source.definitions())
    left = {d.name for d in definitions if is_test_definition(d)} - names
    if not left:
        return None
    edits: list[Edit] = []
    for definition in definitions:
        is_emptied = isinstance(definition.node, ast.ClassDef) and _is_emptied(definition, names, left)
        start, end = source.whole_lines(definition.node)
        if (definition.name in names or is_emptied) and not any(e.start <= start and end <= e.end for e in edits):
            edits.append(Edit(start, end, b""))
    return source.edited(*edits)


def _is_emptied(definition: Definition, names: set[str], left: set[str]) -> bool:
    inside = f"{definition.name}."
    return any(n.startswith(inside) for n in names) and not any(n.startswith(inside) for n in left)
