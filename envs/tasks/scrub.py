"""What an agent must not find in a repository: other states of its code, in git's history, caches, and leftovers.

Files that come as a dictionary are sorted here, by their names and by what the repository's own index and .gitignore
say of them; nothing is run. Where the repository lies in an image, `setup_command` is the shell command line that does
it inside the sandbox (`Task.setup`), since a repository's config can run programs.

History up to the base commit may stay there: an engineer reads it too, and nothing in it is later than the task.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

from composer.errors import TaskError
from envs.tasks.files import read_file
from envs.tasks.trees import MAX_TREE_BYTES, NOT_SOURCES, read_tree

HISTORIES = ("base", "none")
"""base: commits that HEAD reaches stay; none: one commit with the base state is all there is."""
REPOSITORIES = frozenset({".git", ".hg", ".svn", ".bzr"})
CACHES = frozenset(
    {
        *("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".pytype", ".pyre"),
        *(".tox", ".nox", ".eggs", ".nyc_output", ".ipynb_checkpoints", ".history"),
    }
)
"""Folders that tools keep of other states of the code."""
TRACES = (
    *("*.pyc", "*.pyo", ".coverage", ".coverage.*", ".*.sw[a-p]", ".#*", "#*#"),
    *(".DS_Store", ".testmondata", ".dmypy.json", ".*.un~", ".*.~undo-tree~"),
)
"""Files of that kind."""
BUILDS = ("build", "dist", "target", "site", "_build", "htmlcov", "coverage.xml", "*.egg-info")
"""What was built: it goes if the repository does not keep it."""
BACKUPS = (".orig", ".rej", "~")
ARCHIVES = ("*.tar", "*.tar.*", "*.tgz", "*.tbz2", "*.txz", "*.zip", "*.whl", "*.patch", "*.diff")
"""Which may hold the sources, or what was done to them: they go if a repository is there and does not keep them."""
_PACKS = (b"# v2 git bundle", b"# v3 git bundle", b"PACK\0\0\0\2", b"PACK\0\0\0\3")
"""What bundles and packs begin with, whatever their names."""
_INDEX, _INDEX_HEADER, _ENTRY = ".git/index", 12, 62


def scrub_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A repository's files without what an agent must not see: history, caches, and what the repository does not keep.

    A repository of any name goes as a whole: it is told by its HEAD, objects and refs. What the index names stays, and
    what it does not, unless it is one of the kinds above: virtual environments and compiled modules, for example, stay,
    since tests may need them.

    Without an index (`.git/index` among the files), build output goes if a .gitignore names it, and a backup if its
    original lies beside it.

    Args:
        files: path -> content, all of the repository.
    """
    tracked = tracked_paths(files[_INDEX]) if _INDEX in files else None
    ignored = [] if tracked is not None else _ignored_names(files.get(".gitignore", b""))

    repositories = _bare_repositories(files, tracked or frozenset())

    def stays(path: str, content: bytes) -> bool:
        parts = PurePosixPath(path).parts
        if any(str(folder) in repositories for folder in PurePosixPath(path).parents):
            return False
        if not REPOSITORIES.isdisjoint(parts) or not CACHES.isdisjoint(parts[:-1]):
            return False
        if any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in TRACES):
            return parts[-1] == ".coveragerc"
        if "node_modules" in parts and ".cache" in parts[parts.index("node_modules") :]:
            return False
        if ".idea/shelf/" in f"/{path}":
            return False
        if tracked is not None and path in tracked:
            return True
        if tracked is not None and any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in ARCHIVES):
            return False
        builds = [part for part in parts if any(fnmatch.fnmatchcase(part, pattern) for pattern in BUILDS)]
        if builds and (tracked is not None or any(fnmatch.fnmatchcase(b, i) for b in builds for i in ignored)):
            return False
        for ending in BACKUPS:
            if path.endswith(ending) and (tracked is not None or path[: -len(ending)] in files):
                return False
        return not content.startswith(_PACKS)

    return {path: content for path, content in files.items() if stays(path, content)}


def _bare_repositories(files: Mapping[str, bytes], tracked: Collection[str]) -> frozenset[str]:
    """Folders with git's own files, of any name; one that the outer repository keeps is a fixture of its tests."""
    folders: dict[str, set[str]] = {}
    for path in files:
        parts = PurePosixPath(path).parts
        for number, part in enumerate(parts[1:], 1):
            is_last = number == len(parts) - 1
            if part in (("HEAD", "packed-refs") if is_last else ("objects", "refs")):
                folders.setdefault("/".join(parts[:number]), set()).add("refs" if part == "packed-refs" else part)
    return frozenset(
        f for f, has in folders.items() if has >= {"HEAD", "objects", "refs"} and f"{f}/HEAD" not in tracked
    )


def read_repository(root: Path, *, within: Path | None = None, max_bytes: int = MAX_TREE_BYTES) -> dict[str, bytes]:
    """The files of a repository in a folder, scrubbed; arguments and errors as of `read_tree`."""
    files = read_tree(root, within=within, ignored=NOT_SOURCES, max_bytes=max_bytes)
    index = root / ".git" / "index"
    if index.is_file() and not index.is_symlink() and not index.parent.is_symlink():
        try:
            files[_INDEX] = read_file(index, max_bytes)
        except OSError as error:
            raise TaskError(f"{index} cannot be read: {error.strerror}.") from None
    return scrub_files(files)


def setup_command(history: str = "base") -> str:
    """The shell command line that scrubs a sandbox's working directory.

    Raises:
        ValueError: `history` is none of `HISTORIES`.
    """
    if history not in HISTORIES:
        raise ValueError(f"`history` must be one of {', '.join(HISTORIES)}, but is {history!r} instead")
    return f"HISTORY={history}\n{_script()}"


@cache
def _script() -> str:
    return Path(__file__).with_name("scrub.sh").read_text(encoding="utf-8")


def tracked_paths(index: bytes) -> frozenset[str] | None:
    """The paths that a git index names; None if it cannot be read: it is untrusted, or of a newer version."""
    if len(index) < _INDEX_HEADER or index[:4] != b"DIRC":
        return None
    version, count = int.from_bytes(index[4:8]), int.from_bytes(index[8:12])
    if version not in (2, 3):  # 4 compresses its names
        return None
    paths, at = set(), _INDEX_HEADER
    for _ in range(count):
        flags = int.from_bytes(index[at + 60 : at + 62])
        start = at + _ENTRY + (2 if flags & 0x4000 else 0)
        end = index.find(b"\0", start)
        if end < 0:
            return None
        paths.add(index[start:end].decode(errors="surrogateescape"))
        at += (end - at) // 8 * 8 + 8  # entries end with 1 to 8 zero bytes, and are multiples of 8 long
    return frozenset(paths)


def _ignored_names(gitignore: bytes) -> list[str]:
    """Patterns of single names in a .gitignore; what it takes back (`!`) is not ignored."""
    lines = [line.strip() for line in gitignore.decode(errors="replace").splitlines()]
    taken_back = {line[1:].strip("/") for line in lines if line.startswith("!")}
    names = (line.strip("/") for line in lines if line and line[0] not in "#!")
    return [name for name in names if "/" not in name and name not in taken_back]
