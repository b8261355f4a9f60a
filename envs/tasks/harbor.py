"""Taskset `harbor`: task folders as Harbor and Terminal-Bench have them, each with an image of its own.

Harbor: task.toml, instruction.md, environment/Dockerfile (or `docker_image` in task.toml), tests/test.sh, which writes
a reward to /logs/verifier/reward.txt, and solution/solve.sh. Terminal-Bench: task.yaml with the instruction,
Dockerfile, run-tests.sh, which prints pytest's summary, tests/, and solution.sh.

The image is `dockerfile:<path>` where there is a Dockerfile. What is graded are the files of the working directory:
what an agent installs elsewhere does not last. Tasks of several steps or containers are refused.

Graders write to /tests, /logs and /solution, which no image gives to the sandbox's user: the Docker backend has to name
them in `env.sandbox.args.writable`, as conf/env/harbor.yaml does.

History and caches in an image are scrubbed (`envs.tasks.scrub`). A task about git's history or about caches says
`scrub = false` among its metadata: without it, `composer tasks check` finds its reference broken.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from composer.errors import ConfigError, TaskError
from composer.types import Split, Task
from envs.grading.command_grader import Recipe
from envs.tasks.files import parse_yaml, read_file, read_text
from envs.tasks.finite import FiniteTaskset
from envs.tasks.scrub import HISTORIES, setup_command
from envs.tasks.trees import MAX_TREE_BYTES, read_tree

REWARD = "/logs/verifier/reward.txt"
DOCKERFILE = "dockerfile:"
_TESTS, _SOLUTION = "/tests", "/solution"
_MAX_DEPTH = 3
_SCRUB = "scrub"


@dataclass(frozen=True)
class _Entry:
    """One task's folder."""

    folder: Path
    instruction: str
    image: str
    recipe: Recipe
    solution: str = ""
    """Path of the script below the folder; "": there is none."""
    files: tuple[str, ...] = ()
    """Hidden files that lie beside tests/."""
    metadata: dict[str, Any] = field(default_factory=dict)


class HarborTaskset(FiniteTaskset):
    """The tasks of a folder; keys are the folders' paths in it."""

    def __init__(
        self,
        path: str | None = None,
        name: str = "harbor",
        evaluation_share: float = 0.2,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
        history: str = "base",
    ) -> None:
        """Look for task.toml and task.yaml in the folder and those in it, three deep.

        Args:
            path: the folder; None: there are no tasks yet.
            name: begins the tasks' ids.
            evaluation_share: how much of the tasks is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.
            history: what the images keep of repositories', of `envs.tasks.scrub.HISTORIES`.

        Raises:
            ConfigError: there is no such folder, it holds no task, or another value is refused.
            TaskError: a task's folder is not as it has to be, or of a kind that cannot be run here.
        """
        if history not in HISTORIES:
            raise ConfigError("env.taskset.args.history", history, f"must be one of {', '.join(HISTORIES)}")
        self.name, self._setup = name, setup_command(history)
        self._path, self._entries = path, _entries(path) if path is not None else {}
        super().__init__(self._entries, evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` of a split; see `FiniteTaskset.task`.

        Raises:
            IndexError: there is no such task.
            TaskError: the task cannot be made, or no folder was named.
        """
        if self._path is None:
            raise TaskError("env.taskset.args.path=None: name a folder with a folder for each task.")
        return super().task(split, index)

    def solver(self, task: Task) -> tuple[dict[str, bytes], str] | None:
        """The solution's files and the command that runs it in a sandbox of the task, if there is one.

        Raises:
            TaskError: the task is not of this taskset, or its files cannot be read.
        """
        entry = self._entries[self._key(task)]
        if not entry.solution:
            return None
        script = entry.folder / entry.solution
        if script.parent == entry.folder:
            files = {script.name: _read(script)}
        else:
            files = read_tree(script.parent, within=entry.folder)
        return {f"{_SOLUTION}/{p}": c for p, c in files.items()}, f"bash {_SOLUTION}/{script.name}"

    def _make(self, key: str, split: Split) -> Task:
        entry = self._entries[key]
        tests = entry.folder / "tests"
        hidden = read_tree(tests, within=entry.folder) if tests.is_dir() else {}
        hidden |= {name: _read(entry.folder / name) for name in entry.files}
        return Task(
            id=self._id(key, split),
            request=entry.instruction,
            files={},
            hidden_tests=hidden,
            image=entry.image,
            setup="" if entry.metadata.get(_SCRUB) is False else self._setup,
            metadata={**entry.metadata, **entry.recipe.to_metadata()},
        )


def _entries(path: str) -> dict[str, _Entry]:
    root = Path(path)
    if not root.is_dir():
        raise ConfigError("env.taskset.args.path", path, "name a folder with a folder for each task")
    found = {folder.relative_to(root).as_posix(): _entry(folder) for folder in _folders(root, _MAX_DEPTH)}
    if not found:
        raise ConfigError("env.taskset.args.path", path, "no folder in it has a task.toml or a task.yaml")
    return found


def _folders(root: Path, depth: int) -> list[Path]:
    found = []
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink() and p.name[0] != "."):
        if (folder / "task.toml").is_file() or (folder / "task.yaml").is_file():
            found.append(folder)
        elif depth > 1:
            found += _folders(folder, depth - 1)
    return found


def _entry(folder: Path) -> _Entry:
    """Look at one task's folder.

    Raises:
        TaskError: it is not as it has to be.
    """
    is_harbor = (folder / "task.toml").is_file()
    settings = _settings(folder / ("task.toml" if is_harbor else "task.yaml"))
    if (folder / "steps").is_dir():
        raise _wrong(folder, "tasks of several steps (steps/) cannot be run here; leave it out")
    return _harbor(folder, settings) if is_harbor else _terminal_bench(folder, settings)


def _harbor(folder: Path, settings: dict[str, Any]) -> _Entry:
    environment, verifier = _table(folder, settings, "environment"), _table(folder, settings, "verifier")
    if any((folder / "environment" / name).exists() for name in ("docker-compose.yaml", "docker-compose.yml")):
        raise _wrong(folder, "tasks of several containers (docker-compose.yaml) cannot be run here; leave it out")
    if not (folder / "tests" / "test.sh").is_file():
        raise _wrong(folder, "tests/test.sh is missing: it writes the reward")
    image = environment.get("docker_image", "")
    if not isinstance(image, str):
        raise _wrong(folder, f"task.toml: environment.docker_image={image!r:.60} is no text")
    return _Entry(
        folder=folder,
        instruction=_text(folder, "instruction.md"),
        image=image or _dockerfile(folder, folder / "environment" / "Dockerfile"),
        recipe=Recipe(
            command=f"mkdir -p {REWARD.rpartition('/')[0]} && bash {_TESTS}/test.sh",
            report="reward",
            report_path=REWARD,
            hidden_folder=_TESTS,
            restores_tests=False,
            timeout_s=_seconds(folder, verifier.get("timeout_sec")),
        ),
        solution="solution/solve.sh" if (folder / "solution" / "solve.sh").is_file() else "",
        # Dates, for example, are none of JSON's.
        metadata=json.loads(json.dumps(_table(folder, settings, "metadata"), default=str)),
    )


def _terminal_bench(folder: Path, settings: dict[str, Any]) -> _Entry:
    instruction = settings.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise _wrong(folder, "task.yaml has no text `instruction`")
    if not (folder / "run-tests.sh").is_file():
        raise _wrong(folder, "run-tests.sh is missing: it runs the tests")
    if settings.get("parser_name", "pytest") != "pytest":
        raise _wrong(folder, f"task.yaml: parser_name={settings['parser_name']!r} must be 'pytest' to be run here")
    grouped = ("difficulty", "category", "tags", _SCRUB)
    return _Entry(
        folder=folder,
        instruction=instruction.strip(),
        image=_dockerfile(folder, folder / "Dockerfile"),
        recipe=Recipe(
            command=f"TEST_DIR={_TESTS} bash {_TESTS}/run-tests.sh",
            report="pytest",
            hidden_folder=_TESTS,
            restores_tests=False,
            timeout_s=_seconds(folder, settings.get("max_test_timeout_sec")),
        ),
        solution="solution.sh" if (folder / "solution.sh").is_file() else "",
        files=("run-tests.sh",),
        metadata={key: settings[key] for key in grouped if key in settings},
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
        settings = tomllib.loads(text) if path.suffix == ".toml" else parse_yaml(text)
    except OSError as error:
        raise _wrong(path.parent, f"{path.name} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise _wrong(path.parent, f"{path.name} is no UTF-8 text ({error})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: TOML's errors, and endless numbers
        raise _wrong(path.parent, f"{path.name} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise _wrong(path.parent, f"{path.name} must hold keys and values, and holds {settings!r:.60}")
    return settings


def _table(folder: Path, settings: dict[str, Any], key: str) -> dict[str, Any]:
    table = settings.get(key, {})
    if not isinstance(table, dict):
        raise _wrong(folder, f"task.toml: {key}={table!r:.60} is no table")
    return table


def _seconds(folder: Path, value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _wrong(folder, f"its tests' timeout {value!r:.60} is no number of seconds")
    return float(value)


def _dockerfile(folder: Path, path: Path) -> str:
    if not path.is_file():
        raise _wrong(folder, f"{path.relative_to(folder)} is missing, and no image is named")
    if not path.resolve().is_relative_to(folder.resolve()):  # the folder that it leads to would be what it is built of
        raise _wrong(folder, f"{path.relative_to(folder)} is a symbolic link that leads out of it: put a copy there")
    return f"{DOCKERFILE}{path.resolve()}"


def _text(folder: Path, name: str) -> str:
    try:
        text = read_text(folder / name).strip()
    except OSError as error:
        raise _wrong(folder, f"{name} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise _wrong(folder, f"{name} is no UTF-8 text ({error})") from None
    if not text:
        raise _wrong(folder, f"{name} is empty: say what the user asks")
    return text


def _read(path: Path) -> bytes:
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise _wrong(path.parent, f"{path.name} is a symbolic link that leads out of it: put a copy in its place")
    try:
        return read_file(path, MAX_TREE_BYTES)
    except OSError as error:
        raise _wrong(path.parent, f"{path.name} cannot be read ({error.strerror})") from None


def _wrong(folder: Path, what: str) -> TaskError:
    return TaskError(f"Task folder {folder}: {what}.")
