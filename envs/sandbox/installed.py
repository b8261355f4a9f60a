"""Sandboxes that start from environments which `composer autoinstall` made: `image: environment:<folder>`.

A backend around another one. A task, or a taskset for all of its tasks, names the folder as its image; the sandbox then
starts from the snapshot in there, with the environment's variables set in all that runs. Everything else goes to the
backend inside, which has to be of the kind that made the snapshot.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any, cast

import yaml

from composer.contract import ExecResult, Finding, Sandbox, SandboxBackend, SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError

PREFIX = "environment:"
BACKENDS = {
    "bubblewrap": "envs.sandbox.bubblewrap.BubblewrapBackend",
    "docker": "envs.sandbox.docker.backend.DockerBackend",
}
_RECORD, _SNAPSHOT = "environment.yaml", "snapshot"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class _Environment:
    """One that was loaded."""

    snapshot: Snapshot
    variables: Mapping[str, str]


class InstalledEnvironments:
    """Starts sandboxes of another backend from environments' folders."""

    def __init__(self, run_label: str, backend: str = "bubblewrap", args: dict[str, Any] | None = None) -> None:
        """Choose the backend inside; nothing is loaded before a sandbox asks for it.

        Args:
            run_label: as of the backend inside.
            backend: `bubblewrap` or `docker`.
            args: further arguments of its constructor.

        Raises:
            ValueError, TypeError, ConfigError: there is no such backend, or it refuses an argument.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
        module, _, name = BACKENDS[backend].rpartition(".")
        self.inside: SandboxBackend = getattr(importlib.import_module(module), name)(run_label, **(args or {}))
        self._loaded: dict[str, _Environment] = {}
        self._loading = asyncio.Lock()

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        """A fresh sandbox; see `composer.contract.SandboxBackend`.

        Raises:
            SandboxStartError: it could not start, or the environment cannot be loaded.
        """
        if base is not None:
            sandbox = await self.inside.start(files, limits, image=image, base=base)
            known = next((e for e in self._loaded.values() if e.snapshot == base), None)
            return _with(sandbox, known.variables) if known else sandbox
        if not image.startswith(PREFIX):
            return await self.inside.start(files, limits, image=image)
        environment = await self._environment(image)
        try:
            sandbox = await self.inside.start(files, limits, base=environment.snapshot)
        except SandboxStartError as error:
            if "is not there any more" not in str(error):
                raise
            # The backend inside was closed, or has begun anew after trouble; its snapshots went with it.
            self._loaded.pop(image, None)
            environment = await self._environment(image)
            sandbox = await self.inside.start(files, limits, base=environment.snapshot)
        return _with(sandbox, environment.variables)

    async def _environment(self, image: str) -> _Environment:
        async with self._loading:
            if image not in self._loaded:
                folder = Path(image.removeprefix(PREFIX)).expanduser()
                variables = await asyncio.to_thread(read_variables, folder)
                try:
                    snapshot = await self.inside.load(folder / _SNAPSHOT)
                except OSError as error:
                    reason = error.strerror or error
                    raise SandboxStartError(f"image={image!r}: its snapshot cannot be loaded ({reason})") from error
                except SandboxStartError:
                    raise
                except SandboxError as error:
                    raise SandboxStartError(f"image={image!r}: {error}") from error
                self._loaded[image] = _Environment(snapshot, variables)
            return self._loaded[image]

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """See `composer.contract.SandboxBackend`."""
        await self.inside.save(snapshot, path)

    async def load(self, path: Path) -> Snapshot:
        """See `composer.contract.SandboxBackend`."""
        return await self.inside.load(path)

    async def drop(self, snapshot: Snapshot) -> None:
        """See `composer.contract.SandboxBackend`."""
        await self.inside.drop(snapshot)

    async def close(self) -> None:
        """Stop every sandbox. Idempotent; raises nothing."""
        self._loaded.clear()
        await self.inside.close()

    def check(self) -> list[Finding]:
        """What this machine has and lacks for the backend inside."""
        return self.inside.check()

    async def audit(self) -> list[Finding]:
        """What gives a sandbox of the backend inside away.

        Raises:
            SandboxStartError: it could not start.
            SandboxError: it failed under the probe.
        """
        return await self.inside.audit()

    def sweep(self) -> int:
        """Remove what killed runs left behind; see `composer.contract.SandboxBackend`."""
        return self.inside.sweep()


def read_variables(folder: Path) -> dict[str, str]:
    """The variables of an environment.

    Raises:
        SandboxStartError: it is none.
    """
    path = folder / _RECORD
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        variables = record["variables"]
        if record["outcome"] != "installed":
            raise ValueError(f"its outcome is {record['outcome']!r:.40}")
        if not all(isinstance(v, str) and _NAME.fullmatch(k) for k, v in variables.items()):
            raise ValueError("its variables are no texts")
    except OSError as error:
        raise SandboxStartError(
            f"{path} cannot be read ({error.strerror}): name an environment's folder of `composer autoinstall`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise SandboxStartError(f"{path} is no record of an installed environment ({error!r:.200})") from None
    return variables


def _with(sandbox: Sandbox, variables: Mapping[str, str]) -> Sandbox:
    return cast("Sandbox", _Prepared(sandbox, variables)) if variables else sandbox


class _Prepared:
    """A sandbox in which all that runs has an environment's variables."""

    def __init__(self, sandbox: Sandbox, variables: Mapping[str, str]) -> None:
        self._sandbox, self._variables = sandbox, dict(variables)
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

    async def fork(self) -> Sandbox:
        """See `composer.contract.Sandbox`."""
        return _with(await self._sandbox.fork(), self._variables)
