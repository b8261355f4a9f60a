"""Variables that a sandbox has beside its files: set in all that runs there, and kept with its saved states.

A state that is saved with variables is a tar file of two: a note with the variables, and what the backend has saved.
Whoever wrote it is not trusted: the note is checked, and its variables reach nothing but sandboxes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from socket import socket
from typing import Any, cast

from composer.contract import ExecResult, Sandbox, Snapshot
from composer.errors import SandboxError

_NOTE, _STATE = "composer-variables.json", "state"
_FORMAT = "composer-variables-1"
_LARGEST_NOTE = 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def checked(variables: Any) -> dict[str, str]:
    """Variables from a file.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(variables, dict) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) and isinstance(value, str) and "\0" not in value
        for name, value in variables.items()
    ):
        raise ValueError("its variables are no texts")
    return variables


def pack(path: Path, variables: Mapping[str, str], state: Path) -> None:
    """Write a state that a backend has saved to another file, with variables: whole or not at all. Blocks.

    Raises:
        OSError: a file cannot be read or written.
    """
    note = json.dumps({"format": _FORMAT, "variables": dict(variables)}).encode()
    part = partial(path)
    try:
        with state.open("rb") as source, part.open("xb") as to:
            with tarfile.open(fileobj=to, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for name, content, size in (
                    (_NOTE, io.BytesIO(note), len(note)),
                    (_STATE, source, os.fstat(source.fileno()).st_size),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = size
                    tar.addfile(member, content)
            to.flush()
            os.fsync(to.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def partial(path: Path) -> Path:
    """A name beside a file's for what it will hold."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """The file that a backend loads, and the variables; a state without any is the file itself. Blocks.

    Raises:
        OSError: it cannot be read, or there is no room beside it.
        SandboxError: it has a note, and is not as it has to be.
    """
    with path.open("rb") as file, contextlib.ExitStack() as stack:
        try:
            # The next one is not looked for before the first is ours: a backend's own file may hold many.
            tar = stack.enter_context(tarfile.open(fileobj=file, mode="r:"))
            note = tar.next()
        except tarfile.TarError:
            tar = note = None
        if tar is None or note is None or note.name != _NOTE:
            yield path, {}
            return
        try:
            variables = _read(tar, note)
            member = tar.next()
            if member is None or member.name != _STATE or member.type != tarfile.REGTYPE or member.issparse():
                raise ValueError("it holds no state")
            state = stack.enter_context(tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part"))
            shutil.copyfileobj(cast("io.BufferedReader", tar.extractfile(member)), state, 2**20)
            state.flush()
        except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{path} is no state that was saved with variables: {error}") from None
        yield Path(state.name), variables


def _read(tar: tarfile.TarFile, note: tarfile.TarInfo) -> dict[str, str]:
    content = tar.extractfile(note) if note.type == tarfile.REGTYPE and note.size <= _LARGEST_NOTE else None
    fields = json.loads(content.read()) if content is not None else {}
    if fields["format"] != _FORMAT:
        raise ValueError(f"its format is {fields['format']!r:.80}")
    return checked(fields["variables"])


def with_variables(
    sandbox: Sandbox, variables: Mapping[str, str], keep: Callable[[Snapshot, Mapping[str, str]], None]
) -> Sandbox:
    """The sandbox, with variables in all that runs.

    Args:
        sandbox: as a backend started it.
        variables: name -> value; without any, it is the sandbox itself.
        keep: told each snapshot that is made of it or of its forks.
    """
    return cast("Sandbox", _WithVariables(sandbox, variables, keep)) if variables else sandbox


class _WithVariables:
    """A sandbox in which all that runs has variables."""

    def __init__(
        self, sandbox: Sandbox, variables: Mapping[str, str], keep: Callable[[Snapshot, Mapping[str, str]], None]
    ) -> None:
        self._sandbox, self._variables, self._keep = sandbox, dict(variables), keep
        # Only where they are missing: the shell's own changes of them last.
        self._exports = " ".join(
            f'[ "${{{name}+set}}" ] || export {name}={shlex.quote(value)};' for name, value in variables.items()
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def shell(self, command: str, timeout_s: float | None = None) -> ExecResult:
        """See `composer.contract.Sandbox`."""
        return await self._sandbox.shell(f"{self._exports} {command}", timeout_s)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        channel: socket | None = None,
    ) -> ExecResult:
        """See `composer.contract.Sandbox`."""
        merged = {**self._variables, **(env or {})}
        return await self._sandbox.exec(argv, stdin=stdin, env=merged, timeout_s=timeout_s, channel=channel)

    async def snapshot(self) -> Snapshot:
        """See `composer.contract.Sandbox`."""
        snapshot = await self._sandbox.snapshot()
        self._keep(snapshot, self._variables)
        return snapshot

    async def fork(self) -> Sandbox:
        """See `composer.contract.Sandbox`."""
        return with_variables(await self._sandbox.fork(), self._variables, self._keep)
