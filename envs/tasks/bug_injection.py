"""Taskset `bug_injection`: one small fault in a function of a repository that works, which its own tests must notice.

Each mutation of a function that tests seem to use is a task. Whether they notice is only known when they have run:
`composer tasks check` finds out, and with its report as `checked` only those tasks remain. All mutations of a function
are in one split.

Both graders know these tasks: `PytestGrader` wants every test to run, `CommandGrader` minds no skipped ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from composer.errors import ConfigError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset
from envs.tasks.mutations import KINDS, Mutation, mutations
from envs.tasks.python_source import FunctionNode
from envs.tasks.repository import TEST_COMMAND, Repository
from envs.tasks.scrub import HISTORIES, setup_command

REQUESTS = (
    "{name} in {path} is broken, fix it",
    "tests of {name} fail since the last change to {path}",
    "{path}: {name} gives wrong results",
    "something is off with {name} ({path})",
)


class BugInjectionTaskset(FiniteTaskset):
    """Tasks `<file>::<function>::<kind>-<number>` of one repository; its own tests are the hidden tests."""

    def __init__(
        self,
        path: str | None = None,
        name: str = "bug_injection",
        kinds: Sequence[str] = KINDS,
        max_per_function: int = 8,
        visible_tests: bool = True,
        image: str = "",
        test_command: str = TEST_COMMAND,
        history: str = "base",
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the repository and find the mutations.

        Args:
            path: the repository's folder; None: there are no tasks yet.
            name: begins the tasks' ids.
            kinds: of mutations, of `KINDS`.
            max_per_function: how many mutations of a function are tasks.
            visible_tests: whether the agent's repository has the tests.
            image: has what the repository needs to run, and gets its files; "": the env's own.
            test_command: how a `CommandGrader` runs all tests; {test_files} and {report} are filled in.
            history: what the image keeps of the repository's, of `envs.tasks.scrub.HISTORIES`.
            evaluation_share: how much of the functions is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: it is no repository with tests, nothing in it can be mutated, or another value is refused.
            TaskError: the repository cannot be read.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ConfigError("env.taskset.args.kinds", min(unknown), f"must be some of {', '.join(KINDS)}")
        if max_per_function < 1:
            raise ConfigError("env.taskset.args.max_per_function", max_per_function, "must be at least 1")
        if history not in HISTORIES:
            raise ConfigError("env.taskset.args.history", history, f"must be one of {', '.join(HISTORIES)}")
        self._setup = setup_command(history) if image else ""
        self.name, self.visible_tests, self.image = name, visible_tests, image
        self._mutations: dict[str, tuple[str, str, Mutation]] = {}
        if path is None:
            absent = "give env.taskset.args.path the folder of a Python repository with tests"
            super().__init__(
                (), evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, absent=absent
            )
            return
        self.repository = Repository(path)
        self._recipe = self.repository.recipe(test_command)
        families: dict[str, str] = {}
        seen: set[str] = set()
        for file, source in self.repository.library.items():
            for definition in source.definitions():
                function, family = definition.node, f"{file}::{definition.name}"
                if not isinstance(function, FunctionNode) or family in seen:
                    continue
                if not self.repository.tests_of(file, definition):
                    continue

                def key_of(mutation: Mutation, family: str = family) -> str:
                    return f"{family}::{mutation.kind}-{mutation.number}"

                found = mutations(source, function, kinds, lambda m: _hash(key_of(m)), max_per_function)
                if found:  # a declaration of the same name may come before
                    seen.add(family)
                for mutation in found:
                    self._mutations[key_of(mutation)] = file, definition.name, mutation
                    families[key_of(mutation)] = family
        if not self._mutations:
            raise ConfigError(
                "env.taskset.args.path",
                path,
                "no function in it that its tests name can be mutated; choose another one",
            )
        super().__init__(
            self._mutations,
            evaluation_share=evaluation_share,
            seed=seed,
            epochs=epochs,
            checked=checked,
            families=families,
        )

    def reference(self, task: Task) -> dict[str, bytes]:
        """The agent's files before the fault.

        Raises:
            TaskError: the task is not of this taskset.
        """
        file, _, _ = self._mutations[self._key(task)]
        return {**task.files, file: self.repository.files[file]}

    def _make(self, key: str, split: Split) -> Task:
        file, function, mutation = self._mutations[key]
        repository = self.repository
        files = {p: c for p, c in repository.files.items() if self.visible_tests or p not in repository.test_files}
        files[file] = repository.library[file].edited(mutation.edit)
        request = REQUESTS[int(_hash(key), 16) % len(REQUESTS)]
        return Task(
            id=self._id(key, split),
            request=request.format(name=function, path=file),
            files=files,
            hidden_tests=dict(repository.test_files),
            image=self.image,
            setup=self._setup,
            metadata={
                "kind": mutation.kind,
                "file": file,
                "function": function,
                "line": mutation.line,
                **self._recipe.to_metadata(),
            },
        )


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
