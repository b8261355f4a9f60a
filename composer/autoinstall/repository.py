"""Reads a repository that somebody else wrote: its files as bytes, and nothing of it is run or interpreted here.

A folder is copied file by file, whatever its `.git` says. A bundle or a URL is cloned by the git of a sandbox, without
hooks; what comes out is files again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from composer.contract import ExecResult, SandboxBackend, SandboxLimits
from composer.errors import ComposerError

_NO_SOURCES = """
    __pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis .DS_Store .git .hg .svn .venv venv node_modules .tox
    .nox .eggs .idea .vscode
"""
_LEFT_OUT = frozenset(_NO_SOURCES.split())
"""What lies in a repository's folder and is not the repository."""
_URL = re.compile(r"(?:https?|git|ssh)://[^\s]+$")
_GIT = "git -c core.hooksPath=/dev/null -c protocol.ext.allow=never -c protocol.file.allow=always"


class RepositoryError(ComposerError):
    """A repository cannot be read. It is named with the remedy, and the others go on."""


@dataclass(frozen=True)
class Repository:
    """The files of a repository, and where they came from."""

    source: str
    """As it was given."""
    files: dict[str, bytes]
    """Path relative to its folder -> content. Modes are not kept: tasks have none either."""
    commit: str = ""
    """Of a clone."""
    left_out: tuple[str, ...] = field(default=())
    """Paths of what is no regular file: links that lead out of it, sockets, names that are no UTF-8."""

    @property
    def name(self) -> str:
        """The name of its environment."""
        return name_of(self.source)

    @property
    def sha256(self) -> str:
        """Of all paths and contents."""
        digest = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            digest.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()


def name_of(source: str) -> str:
    """The name of the environment of a repository: always the same for one source, another for each.

    Example:
        >>> name_of("https://example.org/team/shop.git")
        'shop-ffe33b87'
    """
    place = source if _URL.match(source) else str(Path(source).expanduser().absolute())
    stem = re.sub(r"\.(git|bundle)$", "", place.rstrip("/").rpartition("/")[2])
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', stem)[:60].lstrip('.-') or 'repository'}-{_short_hash(place)}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


async def read_repository(source: str, backend: SandboxBackend, limits: SandboxLimits, max_bytes: int) -> Repository:
    """The repository at `source`: a folder, a git bundle (`*.bundle`), or a git URL.

    Args:
        source: where it is.
        backend: starts the sandbox in which git runs.
        limits: of that sandbox.
        max_bytes: of all its files together.

    Raises:
        RepositoryError: it cannot be read, has no files, or is too large.
        SandboxError: the sandbox failed.
    """
    if _URL.match(source):
        repository = await _clone(source, source, {}, backend, limits, max_bytes)
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            repository = await asyncio.to_thread(_read_folder, source, path, max_bytes)
        elif path.is_file() and path.suffix == ".bundle":
            content = await asyncio.to_thread(_read_bundle, path, max_bytes)
            repository = await _clone(
                source, "/tmp/repository.bundle", {"/tmp/repository.bundle": content}, backend, limits, max_bytes
            )
        else:
            raise RepositoryError(
                f"repository {source}: it is neither a folder, nor a *.bundle, nor a git URL: name one"
            )
    if not any(repository.files.values()):
        raise RepositoryError(f"repository {source}: there are no files in it: name another")
    return repository


def _read_bundle(path: Path, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise _too_large(str(path), max_bytes)
        return path.read_bytes()
    except OSError as error:
        raise RepositoryError(f"repository {path}: it cannot be read ({error.strerror}): look at its mode") from None


def _too_large(source: str, max_bytes: int) -> RepositoryError:
    return RepositoryError(
        f"repository {source}: it has more than {max_bytes} bytes: raise autoinstall.max_repository_bytes"
    )


def _read_folder(source: str, root: Path, max_bytes: int) -> Repository:
    bounds = root.resolve()
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    left = max_bytes
    try:
        for path in _entries(root):
            name = path.relative_to(root).as_posix()
            try:
                name.encode()
                is_ours = path.is_file() and path.resolve().is_relative_to(bounds)
            except (UnicodeEncodeError, OSError, RuntimeError):  # RuntimeError: a loop of links
                is_ours = False
            if not is_ours:
                left_out.append(name.encode(errors="replace").decode())
                continue
            if (left := left - path.stat().st_size) < 0:
                raise _too_large(source, max_bytes)
            files[name] = path.read_bytes()
    except OSError as error:
        raise RepositoryError(
            f"repository {source}: {error.filename or root} cannot be read ({error.strerror}): look at its mode"
        ) from None
    return Repository(source, files, left_out=tuple(left_out))


def _entries(folder: Path) -> Iterator[Path]:
    """What is not a folder, in order; links to folders are not followed."""
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _entries(path)
        else:
            yield path


async def _clone(
    source: str,
    place: str,
    files: dict[str, bytes],
    backend: SandboxBackend,
    limits: SandboxLimits,
    max_bytes: int,
) -> Repository:
    sandbox = await backend.start({}, limits)
    try:
        for path, content in files.items():
            await sandbox.write(path, content)
        clone = f"{_GIT} clone --quiet --depth 1 --no-tags -- {shlex.quote(place)} ."
        clone += f" && {_GIT} rev-parse HEAD && rm -rf .git"
        done = await sandbox.exec(["sh", "-c", clone], env={"GIT_TERMINAL_PROMPT": "0"})
        if done.timed_out or done.exit_code:
            raise RepositoryError(f"repository {source}: it cannot be cloned in a sandbox ({_said(done)}): look at it")
        try:
            files = await sandbox.files(max_bytes)
        except OSError:
            raise _too_large(source, max_bytes) from None
        named = {path: content for path, content in files.items() if _is_text(path)}
        left_out = tuple(path.encode(errors="replace").decode() for path in files.keys() - named.keys())
        return Repository(source, named, done.output.decode(errors="replace").split()[-1], left_out)
    except OSError as error:
        raise RepositoryError(
            f"repository {source}: it does not fit into a sandbox ({error.strerror}): raise autoinstall.limits"
        ) from None
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _said(done: ExecResult) -> str:
    if done.timed_out:
        return f"git was stopped after {done.seconds:.0f} s"
    return " ".join(done.output[-300:].decode(errors="replace").split()) or f"exit code {done.exit_code}"
