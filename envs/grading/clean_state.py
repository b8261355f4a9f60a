"""Which files grading sandboxes start with: the agent's without those that decide how tests run, and the tests'."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePosixPath

from composer.contract import SandboxLimits
from composer.types import Task

CONFIG_FILES = frozenset(
    {"pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"}
)
"""What pytest 9 looks for (`_pytest.config.findpaths.CONFIG_LOADERS_BY_NAME`)."""
TEST_CONFIG = CONFIG_FILES | {"conftest.py"}
TEST_FOLDERS = frozenset({"test", "tests"})
STARTUP = frozenset({"sitecustomize", "usercustomize"})
_PAGE_BYTES = 4096
"""What a file takes of a disk at least, and a page of one that lies in memory."""
RUNNER_MODULES = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"})


def clean_state(task: Task, final: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files to grade: base state, the agent's changes, and the hidden tests over both.

    What the agent did to tests and to test configuration is undone: such files are restored from the base state, or
    left out where there were none. So are compiled files (pytest would take a forged one for a test's own) and new
    modules that hide the standard library, pytest or a hidden test from the interpreter.

    Args:
        task: base state and hidden tests.
        final: every file the agent left behind.
    """
    files = {path: content for path, content in final.items() if not _decides(path, task)}
    files = _without_collisions(files, _restored(task))
    for hidden in task.hidden_tests:
        files = {path: content for path, content in files.items() if not _in_the_way(path, hidden)}
    return files | task.hidden_tests


def does_not_fit(task: Task, state: Mapping[str, bytes], limits: SandboxLimits) -> str:
    """Why the agent has left too much for a sandbox to be filled with it again; empty if it fits.

    What the task itself brings is not the agent's fault: a state that is no larger than the clean base state fits.
    Half of the disk is kept for what runs: the overlay and /dev/shm have their share of it too.
    """
    room = limits.disk_bytes // 2 // _PAGE_BYTES
    base = clean_state(task, task.files)
    for of, what, most in (
        (_num_entries, "files and folders", room),
        (_num_pages, f"pages of {_PAGE_BYTES} bytes", room),
        (_largest, "bytes in one file", limits.file_bytes),
    ):
        if (num := of(state)) > max(most, of(base)):
            return f"{num} {what} were left behind, of which a grading sandbox takes {most}"
    return ""


def _num_entries(files: Mapping[str, bytes]) -> int:
    folders: set[str] = set()
    for path in files:
        # From below, and no further than what was seen: a path may have thousands of parts.
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return len(files) + len(folders)


def _num_pages(files: Mapping[str, bytes]) -> int:
    return sum(-(-len(content) // _PAGE_BYTES) for content in files.values())


def _largest(files: Mapping[str, bytes]) -> int:
    return max(map(len, files.values()), default=0)


def test_files(task: Task) -> dict[str, bytes]:
    """The files of a sandbox that runs hidden tests and holds no file of the agent's.

    These are the hidden tests, and what of the base state belongs to tests: configuration, conftest.py, tests/.
    """
    return _restored(task) | task.hidden_tests


def _restored(task: Task) -> dict[str, bytes]:
    return {path: content for path, content in task.files.items() if _decides(path, task)}


def _without_collisions(files: Mapping[str, bytes], restored: Mapping[str, bytes]) -> dict[str, bytes]:
    """Both together; a file gives way where a restored one needs a folder, and a folder where it needs a file."""
    folders = {str(folder) for path in restored for folder in PurePosixPath(path).parents}

    def collides(path: str) -> bool:
        return path in folders or any(str(folder) in restored for folder in PurePosixPath(path).parents)

    return {path: content for path, content in files.items() if not collides(path)} | dict(restored)


def _decides(path: str, task: Task) -> bool:
    """Whether a file belongs to the tests and not to the solution."""
    p = PurePosixPath(path)
    stem = _stem(p.name)
    top = _stem(p.parts[0])
    if p.name in TEST_CONFIG or STARTUP & {stem, top} or p.suffix in (".pyc", ".pth") or "__pycache__" in p.parts:
        return True
    if stem.startswith("test_") or stem.endswith("_test") or not TEST_FOLDERS.isdisjoint(p.parts[:-1]):
        return True
    importable = len(p.parts) > 1 or p.suffix in (".py", ".so")
    return importable and path not in task.files and (top in sys.stdlib_module_names or top in RUNNER_MODULES)


def _in_the_way(path: str, hidden: str) -> bool:
    """Whether a file stands where a hidden test goes, or would be imported in its place."""
    p, h = PurePosixPath(path), PurePosixPath(hidden)
    if p in h.parents or h in p.parents:
        return True
    beside = p.parts[: len(h.parts)]
    return beside[:-1] == h.parts[:-1] and _stem(beside[-1]) == h.stem


def _stem(name: str) -> str:
    """The name under which Python would import a file or a folder."""
    return name.split(".", 1)[0]
