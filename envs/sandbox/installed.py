"""Sandboxes that start from environments which `composer autoinstall` made: `image: environment:<folder>`.

A backend around another one. A task, or a taskset for all of its tasks, names the folder as its image; the sandbox then
starts from the snapshot in there, with the environment's variables set in all that runs. What is derived from such a
sandbox has them too: forks, sandboxes from its snapshots, and from states that were saved of it, also in another
process. Everything else goes to the backend inside, which has to be of the kind that made the snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from composer.contract import Finding, Sandbox, SandboxBackend, SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError, SnapshotGoneError
from composer.types import Pressure
from envs.sandbox.variables import checked, pack, partial, unpacked, with_variables

PREFIX = "environment:"
BACKENDS = {
    "bubblewrap": "envs.sandbox.bubblewrap.BubblewrapBackend",
    "docker": "envs.sandbox.docker.backend.DockerBackend",
}
_RECORD, _SNAPSHOT = "environment.yaml", "snapshot"


class InstalledEnvironments:
    """Starts sandboxes of another backend from environments' folders."""

    files_in_memory = True
    """Of either backend inside."""

    def __init__(
        self, run_label: str, backend: str = "bubblewrap", args: dict[str, Any] | None = None, run_dir: str = ""
    ) -> None:
        """Choose the backend inside; nothing is loaded before a sandbox asks for it.

        Args:
            run_label: as of the backend inside.
            backend: `bubblewrap` or `docker`.
            args: further arguments of its constructor.
            run_dir: as of the backend inside.

        Raises:
            ValueError, TypeError, ConfigError: there is no such backend, or it refuses an argument.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
        module, _, name = BACKENDS[backend].rpartition(".")
        inside = getattr(importlib.import_module(module), name)
        self.inside: SandboxBackend = inside(run_label, run_dir=run_dir, **(args or {}))
        self._loaded: dict[str, Snapshot] = {}
        """By image."""
        self._variables: dict[str, Mapping[str, str]] = {}
        """By snapshot, of those whose sandboxes have some."""
        self._loading = asyncio.Lock()

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        """A fresh sandbox; see `composer.contract.SandboxBackend`.

        Raises:
            SandboxStartError: it could not start, or the environment cannot be loaded.
        """
        if base is not None:
            return await self._start_from(base, files, limits)
        if not image.startswith(PREFIX):
            return await self.inside.start(files, limits, image=image)
        environment = await self._environment(image)
        try:
            return await self._start_from(environment, files, limits)
        except SnapshotGoneError:
            # The backend inside was closed, or has begun anew after trouble; its snapshots went with it.
            if self._loaded.get(image) == environment:
                del self._loaded[image]
        return await self._start_from(await self._environment(image), files, limits)

    async def _start_from(self, base: Snapshot, files: Mapping[str, bytes], limits: SandboxLimits) -> Sandbox:
        variables = self._variables.get(base.id, {})
        return with_variables(await self.inside.start(files, limits, base=base), variables, self._keep)

    def _keep(self, snapshot: Snapshot, variables: Mapping[str, str]) -> None:
        if variables:
            self._variables[snapshot.id] = variables

    async def _environment(self, image: str) -> Snapshot:
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
                self._keep(snapshot, variables)
                self._loaded[image] = snapshot
            return self._loaded[image]

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file, with its variables; see `composer.contract.SandboxBackend`.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        variables = self._variables.get(snapshot.id)
        if not variables:
            await self.inside.save(snapshot, path)
            return
        state = partial(path)
        try:
            await self.inside.save(snapshot, state)
            await asyncio.to_thread(pack, path, variables, state)
        finally:
            state.unlink(missing_ok=True)

    async def load(self, path: Path) -> Snapshot:
        """A snapshot from a file that `save` wrote, with its variables; see `composer.contract.SandboxBackend`.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no snapshot of such a backend.
        """
        state = unpacked(path)
        with contextlib.ExitStack() as stack:
            inside, variables = await asyncio.to_thread(stack.enter_context, state)
            snapshot = await self.inside.load(inside)
        self._keep(snapshot, variables)
        return snapshot

    async def drop(self, snapshot: Snapshot) -> None:
        """See `composer.contract.SandboxBackend`."""
        self._variables.pop(snapshot.id, None)
        await self.inside.drop(snapshot)

    async def close(self) -> None:
        """Stop every sandbox. Idempotent; raises nothing."""
        self._loaded.clear()
        self._variables.clear()
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

    async def pressure(self) -> Pressure | None:
        """How hard the machine of the backend inside is pressed; None: it is this one."""
        inside = getattr(self.inside, "pressure", None)
        return await inside() if inside is not None else None

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
        if record["outcome"] != "installed":
            raise ValueError(f"its outcome is {record['outcome']!r:.40}")
        return checked(record["variables"])
    except OSError as error:
        raise SandboxStartError(
            f"{path} cannot be read ({error.strerror}): name an environment's folder of `composer autoinstall`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise SandboxStartError(f"{path} is no record of an installed environment ({error!r:.200})") from None
