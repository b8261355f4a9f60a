"""What of the host must not be seen in a sandbox although it lies below a folder that sandboxes see (rootfs.py).

Sandboxes see all of /usr, and the folders of the Python that runs the product. A checkout in /usr/src/app, an
installation into /usr/local, or a plugin beside it would show an agent how its tasks, and their hidden tests, are made.
So such folders are covered by empty ones; where that would take programs away, the backend refuses to be made.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from composer.errors import ConfigError

_SOURCES = ("/usr/src", "/usr/local/src")
_PACKAGES = ("site-packages", "dist-packages")
_OURS = ("composer/contract.py", "envs/sandbox")
"""What tells an installation of this product, or a checkout."""
_NEEDED = (
    "bin",
    "lib",
    "lib32",
    "lib64",
    "libexec",
    "libx32",
    "local/bin",
    "local/lib",
    "sbin",
    "share",
)
"""Folders in /usr without which programs do not run."""


def folders_to_hide(bound: Sequence[str]) -> tuple[str, ...]:
    """The folders to cover: none of them lies in another.

    Args:
        bound: folders of the host that sandboxes see.

    Raises:
        ConfigError: the working directory, the project, or a folder from which Python imports lies below `bound`, and
            sandboxes need something in it.
    """
    top = [Path(folder) for folder in bound]
    found = {Path(folder).resolve() for folder in _SOURCES if Path(folder).is_dir()}
    found |= {folder.resolve() for folder in _package_folders(top)}
    for what, folder, remedy in _private_folders():
        if not any(folder.is_relative_to(b) for b in top) or any(folder.is_relative_to(f) for f in found):
            continue
        if any(needed.is_relative_to(folder) for needed in _needed(top)):
            raise ConfigError(what, str(folder), f"sandboxes see this folder and cannot do without it: {remedy}")
        found.add(folder)
    below = {folder for folder in found if any(folder.is_relative_to(b) and folder != b for b in top)}
    return tuple(sorted(str(f) for f in below if not any(f != other and f.is_relative_to(other) for other in below)))


def _package_folders(bound: Iterable[Path]) -> Iterator[Path]:
    """Folders of installed packages: those of the Python that runs us, and any with this product in it."""
    imported = set(_import_folders())
    base = Path(sysconfig.get_path("stdlib")).resolve()
    for folder in bound:
        for pattern in (f"{start}python3*/{name}" for start in ("", "lib*/", "local/lib*/") for name in _PACKAGES):
            for path in folder.glob(pattern):
                ours = any((path / mark).exists() for mark in _OURS)
                if ours or path.resolve() in imported or path.resolve().is_relative_to(base):
                    yield path
    yield from (path for path in imported if path.name in _PACKAGES)


def _private_folders() -> Iterator[tuple[str, Path, str]]:
    """What it is, the folder, and what to do if it cannot be hidden."""
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        yield "working directory", Path.cwd().resolve(), "start composer in another folder"
    yield "project", Path(__file__).resolve().parents[2], "move composer's folder to another place"
    stdlib = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    for folder in _import_folders():
        if not any(folder.is_relative_to(library) for library in stdlib):
            yield "sys.path", folder, "take it out of PYTHONPATH, and move what is imported from it"


def _import_folders() -> Iterator[Path]:
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # relative to a working directory that was removed
            if (folder := Path(entry).resolve()).is_dir():
                yield folder


def _needed(bound: Sequence[Path]) -> list[Path]:
    """Folders that may not be covered."""
    python = Path(sys.base_prefix).resolve()
    return [
        *bound,
        *(Path("/usr") / name for name in _NEEDED),
        *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
        python / "bin",
        python / "lib",
    ]
