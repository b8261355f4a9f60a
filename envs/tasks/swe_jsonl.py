"""Taskset `swe_jsonl`: real issues of real repositories, from a file of JSON lines in the shape of SWE-bench.

The repository as it was lies in an image of each instance (or in a folder of each, for backends without images). What
its agent sees of package indexes ends at `created_at`, if the instance says when its issue was opened. The tests of the
right solution come as a diff, which `envs.grading.command_grader` applies to the base state's files; which tests must
pass is in FAIL_TO_PASS and PASS_TO_PASS, as node ids of pytest.
"""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

from composer.errors import ConfigError, TaskError
from composer.types import CREATED_AT, Split, Task
from envs.grading.command_grader import Recipe
from envs.grading.unified_diff import apply_diff, parse_diff
from envs.tasks.finite import FiniteTaskset
from envs.tasks.records import read_records
from envs.tasks.scrub import HISTORIES, read_repository, setup_command

FIELDS = ("instance_id", "problem_statement", "patch", "test_patch")
IMAGE_FIELDS = ("image", "image_name", "docker_image")
TEST_COMMAND = "python3 -m pytest -p no:cacheprovider --junitxml={report} {test_files}"
_TESTS_PATCH = "tests.patch"
_SOLUTION = ".composer_solution.patch"
_LAST_SECONDS = 10**11
"""Of the year 5138: numbers above it are milliseconds."""
_MAX_REPOSITORY_BYTES = 256 * 2**20


class SweJsonlTaskset(FiniteTaskset):
    """Tasks by instance id; those of one repository may be in both splits."""

    def __init__(
        self,
        path: str | None = None,
        name: str = "swe",
        image: str = "",
        repositories: str = "",
        test_command: str = TEST_COMMAND,
        timeout_s: float = 0.0,
        history: str = "base",
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the instances.

        Args:
            path: a file of JSON lines, or .jsonl.gz; None: there are no tasks yet.
            name: begins the tasks' ids.
            image: the image of an instance that names none (`IMAGE_FIELDS`); {instance_id}, {repo}, {base_commit}, and
                {tag}, the id in the spelling of SWE-bench's registry, are filled in.
            repositories: a folder with each instance's base state in a folder of its id, in place of images.
            test_command: a shell's command line; {report}, and {test_files}, those of the tests that must pass, are
                filled in. An instance's own `test_command` comes first. It must write a JUnit report to {report}, or
                print pytest's summary (`-rA`).
            timeout_s: wall time of it; 0: as long as the grader allows.
            history: what the images keep of the repositories', of `envs.tasks.scrub.HISTORIES`.
            evaluation_share: how much of the instances is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: there is no such file, it has another shape, an instance has no base state, or another value
                is refused.
        """
        if history not in HISTORIES:
            raise ConfigError("env.taskset.args.history", history, f"must be one of {', '.join(HISTORIES)}")
        self._setup = setup_command(history)
        self.name, self.test_command, self.timeout_s = name, test_command, timeout_s
        self._folder = Path(repositories) if repositories else None
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError("env.taskset.args.repositories", repositories, "name a folder with a folder an instance")
        self._instances: dict[str, dict[str, Any]] = {}
        self._images: dict[str, str] = {}
        if path is None:
            absent = "give env.taskset.args.path a file of JSON lines in the shape of SWE-bench"
            super().__init__(
                (), evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, absent=absent
            )
            return
        for record in read_records(Path(path), FIELDS):
            instance = record["instance_id"]
            if not instance or "/" in instance or instance.startswith("."):
                raise ConfigError("env.taskset.args.path", path, f"instance_id={instance!r} is no name of a folder")
            if instance in self._instances:
                raise ConfigError("env.taskset.args.path", path, f"it holds instance {instance} twice")
            try:
                parse_diff(record["test_patch"].encode())
                record["created_at"] = _date(record.get("created_at"))
                record["tests"] = [_ids(record, "FAIL_TO_PASS"), _ids(record, "PASS_TO_PASS")]
            except ValueError as error:
                raise ConfigError("env.taskset.args.path", path, f"instance {instance}: {error}") from None
            self._instances[instance] = record
            self._images[instance] = "" if self._folder else _image(record, image)
            if not self._folder and not self._images[instance]:
                raise ConfigError(
                    "env.taskset.args.image",
                    image,
                    f"instance {instance} names no image: name one for all, or give `repositories`",
                )
        super().__init__(self._instances, evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked)

    def reference(self, task: Task) -> dict[str, bytes] | None:
        """The files with the right patch, where the base state is at hand.

        Raises:
            TaskError: the task is not of this taskset, or its patch does not fit.
        """
        instance = self._instances[self._key(task)]
        if self._folder is None:
            return None
        try:
            changed = apply_diff(instance["patch"].encode(), task.files)
        except ValueError as error:
            raise TaskError(f"The patch of instance {instance['instance_id']} cannot be applied: {error}.") from None
        return {p: content for p, content in {**task.files, **changed}.items() if content is not None}

    def solver(self, task: Task) -> tuple[dict[str, bytes], str]:
        """What turns a sandbox of the task's image into a right solution: files, and a command.

        Raises:
            TaskError: the task is not of this taskset.
        """
        patch = self._instances[self._key(task)]["patch"].encode()
        return {_SOLUTION: patch}, f"git apply {_SOLUTION} || patch -p1 -i {_SOLUTION}"

    def _make(self, key: str, split: Split) -> Task:
        instance = self._instances[key]
        files: dict[str, bytes] = {}
        if self._folder is not None:
            if not (self._folder / key).is_dir():
                raise TaskError(f"Instance {key} has no base state: {self._folder / key} is no folder.")
            files = read_repository(self._folder / key, max_bytes=_MAX_REPOSITORY_BYTES)
        fail_to_pass, pass_to_pass = instance["tests"]
        command = instance.get("test_command") or self.test_command
        test_files = sorted({node_id.split("::", 1)[0] for node_id in (*fail_to_pass, *pass_to_pass)})
        recipe = Recipe(
            command=command.replace("{test_files}", shlex.join(test_files)),
            report="junit" if "{report}" in command else "pytest",
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            patch=_TESTS_PATCH,
            timeout_s=self.timeout_s,
            kept=_changed_by_the_solution(instance),
        )
        return Task(
            id=self._id(key, split),
            request=instance["problem_statement"].strip(),
            files=files,
            hidden_tests={_TESTS_PATCH: instance["test_patch"].encode()},
            image=self._images[key],
            setup=self._setup if self._images[key] else "",
            metadata={
                "repo": instance.get("repo", ""),
                "base_commit": instance.get("base_commit", ""),
                **({CREATED_AT: instance["created_at"]} if instance["created_at"] else {}),
                **recipe.to_metadata(),
            },
        )


def _ids(record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """A list of node ids, which may be JSON in a text.

    Raises:
        ValueError: it is no such list, or one that must not be empty is.
    """
    value = record.get(field, [])
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(node_id, str) for node_id in value):
        raise ValueError(f"{field} is no list of texts")
    if field == "FAIL_TO_PASS" and not value:
        raise ValueError(f"{field} is empty, so nothing tells right from wrong")
    return tuple(value)


def _date(value: Any) -> str:
    """A moment in ISO 8601, of such a text or of seconds or milliseconds since 1970; "": there is none.

    Raises:
        ValueError: it is neither.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if value > _LAST_SECONDS else value
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
    try:
        return datetime.datetime.fromisoformat(str(value).removesuffix(" UTC")).isoformat()
    except ValueError:
        raise ValueError(f"created_at={value!r} is no date such as 2024-05-01T12:00:00Z") from None


def _image(record: Mapping[str, Any], template: str) -> str:
    for field in IMAGE_FIELDS:
        if isinstance(record.get(field), str) and record[field]:
            return record[field]
    values = {field: str(record.get(field, "")) for field in ("instance_id", "repo", "base_commit")}
    values["tag"] = values["instance_id"].replace("__", "_1776_").lower()
    for field, value in values.items():
        template = template.replace(f"{{{field}}}", value)
    return template


def _changed_by_the_solution(instance: Mapping[str, Any]) -> tuple[str, ...]:
    """Files that the right patch changes, and the tests' patch does not: of these, the agent's are graded."""
    try:
        patch, tests = (
            {file.new or file.old or "" for file in parse_diff(instance[key].encode())}
            for key in ("patch", "test_patch")
        )
    except ValueError:  # `reference` says so
        return ()
    return tuple(map(escape, sorted(patch - tests)))
