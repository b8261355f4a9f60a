"""Taskset `folder`: a folder a task, written by hand.

    <path>/<task>/request.md      what the user asks (or request.txt)
    <path>/<task>/files/…         the repository that the agent gets; may be missing
    <path>/<task>/tests/…         hidden tests, laid over the working directory when the work is graded
    <path>/<task>/solution/…      optional: files of a right solution, laid over files/
    <path>/<task>/task.yaml       optional: the keys of `KEYS`

Tests that import `composer_solution` are the honest ones (see `envs.grading.pytest_grader`). In other languages than
Python, `metadata: {grading: {command: make test}}` says how `envs.grading.command_grader` runs them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task
from envs.tasks.files import parse_yaml, read_text
from envs.tasks.finite import FiniteTaskset
from envs.tasks.scrub import scrub_files, setup_command
from envs.tasks.trees import read_tree

KEYS = {"id": str, "image": str, "split": str, "timeout": (int, float), "metadata": dict, "scrub": bool}
"""id: in place of the folder's name; image: what its sandboxes start from; split: train or evaluation, in place of the
hash's choice; timeout: wall time of its tests, in seconds; metadata: what reports may want to group by; scrub: false if
the task is about git's history or caches, which an agent does not get to see otherwise (`envs.tasks.scrub`)."""
EXAMPLES = Path(__file__).with_name("examples")
REQUESTS = ("request.md", "request.txt")
_PARTS = {*REQUESTS, "files", "tests", "solution", "task.yaml"}


@dataclass(frozen=True)
class _Entry:
    """A task's folder and what its task.yaml says."""

    folder: Path
    id: str
    request: Path
    image: str = ""
    split: Split | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    scrub: bool = True


class FolderTaskset(FiniteTaskset):
    """The tasks of a folder; each is a folder in it. Names that begin with a dot or an underscore are left alone."""

    def __init__(
        self,
        path: str | None = None,
        name: str = "folder",
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Look through the folder; the files of a task are read when it is asked for.

        Args:
            path: the folder of the tasks' folders; None: two examples (examples/).
            name: begins the tasks' ids.
            evaluation_share: how much of the tasks without a `split` is for evaluation, 0 to 1.
            seed: changes their order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: there is no such folder, it holds no task, or another value is refused.
            TaskError: a task's folder is not as it has to be, or two tasks have one id.
        """
        self.name = name
        root = EXAMPLES if path is None else Path(path).expanduser()
        try:
            folders = sorted(p for p in root.iterdir() if p.name[0] not in "._" and not p.is_file())
        except OSError as error:
            raise ConfigError(
                "env.taskset.args.path", path, f"name a folder with a folder for each task ({error.strerror})"
            ) from None
        self._entries: dict[str, _Entry] = {}
        for folder in folders:
            entry = _entry(folder, root.resolve())
            if entry.id in self._entries:
                raise TaskError(
                    f"Task folders {self._entries[entry.id].folder} and {folder} have one id, {entry.id}: change one."
                )
            self._entries[entry.id] = entry
        if not self._entries:
            raise ConfigError("env.taskset.args.path", path, "there is no task in it: a task is a folder in it")
        fixed = {entry.id: entry.split for entry in self._entries.values() if entry.split}
        super().__init__(
            self._entries, evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, fixed=fixed
        )

    def reference(self, task: Task) -> dict[str, bytes] | None:
        """The files of the task's solution, if it has one.

        Raises:
            TaskError: the task is not of this taskset, or a file cannot be read.
        """
        folder = self._entries[self._key(task)].folder
        if not (folder / "solution").is_dir():
            return None
        return {**task.files, **read_tree(folder / "solution", within=folder)}

    def _make(self, key: str, split: Split) -> Task:
        entry = self._entries[key]
        try:
            request = read_text(entry.request).strip()
        except OSError as error:
            raise TaskError(
                f"Task folder {entry.folder}: {entry.request.name} cannot be read ({error.strerror})."
            ) from None
        except UnicodeDecodeError as error:
            raise TaskError(f"Task folder {entry.folder}: {entry.request.name} is no UTF-8 text ({error}).") from None
        if not request:
            raise TaskError(f"Task folder {entry.folder}: {entry.request.name} is empty: say what the user asks.")
        folder = entry.folder / "files"
        files = read_tree(folder, within=entry.folder) if folder.is_dir() else {}
        return Task(
            id=self._id(key, split),
            request=request,
            files=scrub_files(files) if entry.scrub else files,
            hidden_tests=read_tree(entry.folder / "tests", within=entry.folder),
            image=entry.image,
            setup=setup_command() if entry.image and entry.scrub else "",
            metadata=dict(entry.metadata),
        )


def _entry(folder: Path, root: Path) -> _Entry:
    """Look at one task's folder.

    Raises:
        TaskError: it is not as it has to be.
    """

    def wrong(what: str) -> TaskError:
        return TaskError(f"Task folder {folder}: {what}.")

    if not folder.resolve().is_relative_to(root) or not folder.is_dir():
        raise wrong(f"it is no folder in {root} (a symbolic link that leads out of it?): put a copy in its place")
    try:
        names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    except OSError as error:
        raise wrong(f"it cannot be read ({error.strerror})") from None
    if unknown := sorted(names - _PARTS - {"README.md"}):
        raise wrong(f"{unknown[0]} is none of {', '.join(sorted(_PARTS))}: rename it, or move it into files/ or tests/")
    requests = [name for name in REQUESTS if name in names]
    if len(requests) != 1:
        raise wrong(f"it needs a request.md or a request.txt, and has {'both' if requests else 'none'}")
    for name in names & {"files", "tests", "solution"}:
        if not (folder / name).is_dir():
            raise wrong(f"{name} is no folder: make it one")
    for path in folder.iterdir():
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise wrong(f"{path.name} is a symbolic link that leads out of it: put a copy in its place")
    if "tests" not in names or not any((folder / "tests").rglob("*")):
        raise wrong("it has no tests/ with hidden tests: without them there is no reward")
    given = _read_keys(folder / "task.yaml", wrong) if "task.yaml" in names else {}
    # Dates, for example, are none of JSON's.
    metadata = json.loads(json.dumps(given.get("metadata", {}), default=str))
    if "timeout" in given:
        metadata["timeout_s"] = float(given["timeout"])
    return _Entry(
        folder=folder,
        id=given.get("id", folder.name),
        request=folder / requests[0],
        image=given.get("image", ""),
        split=Split(given["split"]) if "split" in given else None,
        metadata=metadata,
        scrub=given.get("scrub", True),
    )


def _read_keys(path: Path, wrong: Any) -> dict[str, Any]:
    try:
        given = parse_yaml(read_text(path)) or {}
    except OSError as error:
        raise wrong(f"task.yaml cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise wrong(f"task.yaml is no UTF-8 text ({error})") from None
    except yaml.YAMLError as error:
        raise wrong(f"task.yaml is no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(given, dict):
        raise wrong(f"task.yaml must hold keys and values, and holds {given!r:.60}")
    for key, value in given.items():
        if key not in KEYS:
            raise wrong(f"task.yaml has an unknown key {key!r}: the keys are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool) != (KEYS[key] is bool):
            expected = {str: "a text", dict: "keys and values", bool: "true or false"}.get(KEYS[key], "a number")
            raise wrong(f"task.yaml: {key} must be {expected}, and is {value!r:.60}")
    if given.get("id") == "":
        raise wrong("task.yaml: id is empty: name the task")
    if given.get("split", Split.TRAIN) not in list(Split):
        raise wrong(f"task.yaml: split={given['split']!r} must be {' or '.join(Split)}")
    if not given.get("timeout", 1) > 0:
        raise wrong(f"task.yaml: timeout={given['timeout']} must be more than 0 seconds")
    return given
