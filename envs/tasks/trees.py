"""Reads the files of a folder that somebody else wrote, and nothing outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from composer.errors import TaskError
from envs.tasks.files import read_file

LEFTOVERS = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".DS_Store"})
"""What tools and systems leave in any folder."""
NOT_SOURCES = LEFTOVERS | {".git", ".hg", ".venv", "venv", "node_modules", ".tox", ".nox", ".eggs", ".idea", ".vscode"}
"""What lies in a repository's folder and is not the repository."""
MAX_TREE_BYTES = 64 * 2**20
_MAX_ENTRIES, _MAX_DEPTH = 100_000, 200


def read_tree(
    root: Path, *, within: Path | None = None, ignored: frozenset[str] = LEFTOVERS, max_bytes: int = MAX_TREE_BYTES
) -> dict[str, bytes]:
    """Every file below a folder, path relative to it -> content; a link to a file counts as the file.

    Args:
        root: the folder.
        within: where links may lead; None: the folder itself.
        ignored: names of files and folders that are left out.
        max_bytes: of all files together.

    Raises:
        TaskError: a link leads out of the folder, to a folder or nowhere, something is no file, cannot be read or has
            no name in UTF-8, or the files are too large, too many or too deep.
    """
    bounds = (within or root).resolve()
    files: dict[str, bytes] = {}
    left, path = max_bytes, root
    try:
        for path in _entries(root, ignored):
            if path.is_symlink():
                _check_link(path, bounds)
            if not path.is_file():
                raise TaskError(f"{path} is neither a file nor a folder: remove it.")
            if len(files) >= _MAX_ENTRIES:
                raise TaskError(f"{root} holds more than {_MAX_ENTRIES} files: make the task smaller.")
            if (left := left - path.stat().st_size) < 0:
                raise TaskError(f"The files in {root} have more than {max_bytes} bytes: make the task smaller.")
            name = path.relative_to(root).as_posix()
            name.encode()
            files[name] = read_file(path, path.stat().st_size)
    except UnicodeEncodeError:
        raise TaskError(
            f"{root} holds a name that is no UTF-8: rename {str(path).encode(errors='replace')!r}."
        ) from None
    except OSError as error:
        raise TaskError(f"{error.filename or root} cannot be read: {error.strerror or error}.") from None
    return files


def _entries(folder: Path, ignored: frozenset[str], depth: int = 0) -> Iterator[Path]:
    """What is not a folder, in order."""
    if depth > _MAX_DEPTH:
        raise TaskError(f"{folder} lies more than {_MAX_DEPTH} folders deep: make the task smaller.")
    for path in sorted(folder.iterdir()):
        if path.name in ignored or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _entries(path, ignored, depth + 1)
        else:
            yield path


def _check_link(path: Path, bounds: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop
        raise TaskError(f"{path} is a symbolic link that leads nowhere: remove it.") from None
    if not target.is_relative_to(bounds):
        raise TaskError(f"{path} is a symbolic link that leads out of {bounds}: put a copy in its place.")
    if target.is_dir():
        raise TaskError(f"{path} is a symbolic link to a folder: put a copy in its place.")
