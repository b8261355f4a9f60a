"""The bubblewrap backend: sandboxes from Linux namespaces, without a daemon and without being root.

Each sandbox has its own user, mount, PID, network, IPC, UTS and control-group namespace; a root directory overlaid on
a small synthetic system with the host's /usr read-only; one user that is not root; no capability, no new privileges,
a seccomp filter, nothing of the host's environment, no network or one that ends at a proxy (envs/egress); and the
limits of limits.py.

What it does not protect against: holes in the host's kernel, which all sandboxes share; time spent (a sandbox may use
its CPU limit to the full); and being told apart from a real machine by a program that looks closely.

Run by root, sandboxes belong to a user of their own that owns nothing on the host; run by an ordinary user, they belong
to that user, and only their namespaces keep them from his files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.contract import Finding, SandboxLimits, Snapshot
from composer.errors import ConfigError, SandboxError, SandboxStartError, SnapshotGoneError
from envs.sandbox import checks, state
from envs.sandbox.control import ForkServerClient
from envs.sandbox.limits import ControlGroup, ControlGroups, LimitError
from envs.sandbox.limits_check import check_limits
from envs.sandbox.machine import bwrap_path, find_control_groups, sandbox_uid
from envs.sandbox.packages import pytest_files
from envs.sandbox.private import folders_to_hide
from envs.sandbox.realism import audit as realism
from envs.sandbox.realism.load import load_profile
from envs.sandbox.rootfs import Rootfs, bound_folder, bound_folders
from envs.sandbox.sandbox import BubblewrapSandbox
from envs.sandbox.seccomp import build_filter
from envs.sandbox.snapshots import MAX_LAYERS, Snapshots

if TYPE_CHECKING:
    from envs.egress.client import Proxy

_START_TIMEOUT_S = 30.0


class BubblewrapBackend:
    """Starts bubblewrap sandboxes.

    Example:
        >>> async def example() -> bytes:
        ...     backend = BubblewrapBackend("example")
        ...     sandbox = await backend.start({"hello.txt": b"hello"}, SandboxLimits())
        ...     result = await sandbox.shell("cat hello.txt")
        ...     await backend.close()
        ...     return result.output
    """

    files_in_memory = True
    """A tmpfs below the overlay, which counts as the sandbox's memory."""

    def __init__(
        self,
        run_label: str,
        workdir: str = "/home/dev/project",
        user: str | None = None,
        hostname: str | None = None,
        python: bool = True,
        profile: str = "developer",
        snapshot_bytes: int = 2**30,
        folders: Sequence[str] = (),
        egress: dict[str, Any] | None = None,
        run_dir: str = "",
    ) -> None:
        """Nothing starts before the first sandbox does.

        Args:
            run_label: of the run; part of the names of what this backend makes on the host.
            workdir: absolute path in the sandbox in which commands start.
            user: name of the sandbox's user; None: the profile's.
            hostname: of the sandbox; None: the profile's.
            python: whether `python3` with pytest is there: the Python that runs this process, and its pytest.
            snapshot_bytes: what all snapshots together may take of the machine's memory.
            folders: folders of this machine that sandboxes see read-only, with all that is in them: absolute paths, or
                `<path>:<path in the sandbox>`. Programs that agents need, for instance.
            profile: what sandboxes look like (realism/profiles): `developer`, `plain`, or a YAML file of your own.
            egress: what they may ask of the network (`envs.egress.policy.Policy`); None: they have none.
            run_dir: of the run, in which `egress/` is for the log of what they asked; "": there is none.

        Raises:
            ValueError: an argument cannot be what it names.
            ConfigError: the working directory or the project lies where sandboxes see it; see private.py; or `egress`
                holds something that it cannot.
        """
        if not workdir.startswith("/") or ".." in Path(workdir).parts or Path(workdir) == Path("/"):
            raise ValueError(f"workdir={workdir!r}: must be an absolute path without '..', other than '/'")
        self._arguments: dict[str, Any] = {
            "workdir": workdir,
            "user": user,
            "hostname": hostname,
            "python": python,
            "profile": profile,
            "snapshot_bytes": snapshot_bytes,
            "folders": tuple(folders),
            "egress": egress,
            "run_dir": run_dir,
        }
        self.profile = load_profile(profile, user=user, hostname=hostname)
        for name, value in (("user", self.profile.user), ("hostname", self.profile.hostname)):
            if not value.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"{name}={value!r}: must be letters, digits, '-' and '_'")
        folders_to_hide(bound_folders(python=True))
        if snapshot_bytes < 0:
            raise ValueError(f"snapshot_bytes={snapshot_bytes}: must be at least 0")
        self.folders = tuple(bound_folder(folder) for folder in folders)
        self.run_label, self.workdir, self.python = run_label, workdir, python
        self.snapshot_bytes = snapshot_bytes
        self.proxy: Proxy | None = None
        """Through which sandboxes reach the network, if they do."""
        if egress is not None:
            from envs.egress.client import make_proxy  # without a network, nothing of it is loaded

            self.proxy = make_proxy(egress, run_label, run_dir, self._on_outage)
        self._server: ForkServerClient | None = None
        self._state: state.State | None = None
        self._groups: ControlGroups | None = None
        self._snapshots: Snapshots | None = None
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._online: set[str] = set()
        """Those with a network."""
        self._layers: dict[str, tuple[str, ...]] = {}
        """By sandbox: the snapshots' layers that it has started from."""
        self._numbers = itertools.count(1)
        self._layer_numbers = itertools.count(1)
        """Of all fork servers that there will be: an old snapshot is never taken for another's."""

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> BubblewrapSandbox:
        """A fresh sandbox, with `files` in its `workdir`; see `composer.contract.SandboxBackend`.

        Raises:
            SandboxStartError: it could not start, a limit could not be applied, or there is no such image or snapshot.
        """
        check_limits(limits)
        if image:
            raise SandboxStartError(f"image={image!r}: bubblewrap's sandboxes have the host's programs, and no images")
        server = await self._ready()
        sandbox = self._begin(server, limits, self._chain(base))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await sandbox.wait_until_started(files)
        except TimeoutError as e:
            await sandbox.stop()
            raise SandboxStartError(f"sandbox {sandbox.id} did not start within {_START_TIMEOUT_S:g} s") from e
        except SandboxStartError as e:
            await sandbox.stop()
            raise SandboxStartError(f"{e}; {_hint()}" if "namespace" in str(e) else str(e)) from e
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _ready(self) -> ForkServerClient:
        """The fork server; a new one if the last has ended.

        Raises:
            SandboxStartError: it does not start.
        """
        if self._server is not None and self._server.failure:
            await self.close()
        if self.proxy is not None:
            await self.proxy.ready()
        server = self._server or self._launch()
        try:
            await server.ready()
        except SandboxStartError as e:
            await self.close()
            raise SandboxStartError(f"{e}; {_hint()}") from e
        return server

    def _launch(self) -> ForkServerClient:
        private = (Path(__file__).parents[2].resolve(), Path.cwd())
        for folder, _ in self.folders:
            if not Path(folder).is_dir():
                raise SandboxStartError(f"folders={folder!r}: no such folder on this machine: make it, or name another")
            if seen := [path for path in private if path.is_relative_to(Path(folder).resolve())]:
                raise SandboxStartError(f"folders={folder!r}: sandboxes would see {seen[0]}: name a smaller folder")
        try:
            rootfs = Rootfs(
                self.workdir,
                self.profile,
                sandbox_uid(),
                str(bwrap_path()),
                self.python,
                pytest_files() if self.python else (),
                # Anew, since plugins may have been found after this backend was made.
                folders_to_hide(bound_folders(python=True)),
                self.folders,
                self.proxy.root if self.proxy is not None else None,
            )
        except ConfigError as e:
            raise SandboxStartError(f"sandboxes cannot be started: {e}") from e
        try:
            build_filter()
            self._state = state.State.create(self.run_label)
        except (OSError, ValueError) as e:
            raise SandboxStartError(f"sandboxes cannot be started: {e}") from e
        try:
            self._groups = find_control_groups(f"composer.{self._state.name}")
            if self._groups is not None:
                self._groups.create()
            self._server = ForkServerClient(rootfs, self._state, self._groups, self._on_ended)
            self._snapshots = Snapshots(self._server, self.snapshot_bytes, self._layer_numbers)
        except LimitError as e:
            self._clean_up()
            raise SandboxStartError(str(e)) from e
        except SandboxStartError:
            self._clean_up()
            raise
        return self._server

    def _chain(self, base: Snapshot | None) -> tuple[str, ...]:
        """The layers of a snapshot.

        Raises:
            SandboxStartError: it is gone.
        """
        if base is None:
            return ()
        chain = self._snapshots.chain(base) if self._snapshots is not None else None
        if chain is None:
            raise SnapshotGoneError(f"snapshot {base.id!r} is not there any more: it was dropped, or its backend ended")
        return chain

    def _begin(self, server: ForkServerClient, limits: SandboxLimits, chain: tuple[str, ...]) -> BubblewrapSandbox:
        name = f"{next(self._numbers):05d}"
        sleepers = len(self.profile.processes)
        stacked, copied = chain[:MAX_LAYERS], "".join(chain[MAX_LAYERS:])
        is_online = self.proxy is not None and self.proxy.serves(limits)
        ours, theirs = socket.socketpair()
        group: ControlGroup | None = None
        fds = [theirs.fileno()]
        try:
            if self._groups is not None:
                group = self._groups.group(name, limits.memory_bytes, limits.num_processes + sleepers)
                fds += [*group.open_for_attach(), group.open_members()]
            if self.proxy is not None and is_online:
                fds.append(self.proxy.give(name, limits))
            sandbox = BubblewrapSandbox(
                f"{self.run_label}/{name}", name, self.workdir, limits, server, ours, group, self, sleepers, self.python
            )
            server.start(
                {
                    "id": name,
                    "grouped": group is not None,
                    "egress": is_online,
                    "disk_bytes": limits.disk_bytes,
                    "snapshots": stacked,
                    "copied": copied,
                    "lifetime_s": limits.lifetime_s,
                    "limits": {
                        "memory_bytes": limits.memory_bytes,
                        "num_processes": limits.num_processes + sleepers,
                        "file_bytes": limits.file_bytes,
                        "cpu_seconds": limits.cpu_seconds,
                        "output_bytes": limits.output_bytes,
                    },
                },
                fds,
            )
        except (LimitError, OSError) as e:
            ours.close()
            if group is not None:
                group.remove()
            raise SandboxStartError(f"sandbox {name} cannot be started: {e}") from e
        finally:
            for fd in fds[1:]:
                os.close(fd)
            theirs.close()
        self._sandboxes[name] = sandbox
        if is_online:
            self._online.add(name)
        if self._snapshots is not None:
            self._layers[name] = stacked
            self._snapshots.hold(stacked)
        return sandbox

    async def keep(self, name: str, limits: SandboxLimits) -> Snapshot:
        """Make a snapshot of the sandbox `name`.

        Raises:
            OSError: it could not be copied, or the snapshots would be over `snapshot_bytes`.
        """
        if self._snapshots is None or name not in self._layers:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return await self._snapshots.add(self._layers[name], limits.disk_bytes, {"op": "copy", "id": name})

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file, which this backend can `load` also in another process: whole or not at all.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        if self._snapshots is None:
            raise SandboxError(f"snapshot {snapshot.id!r} is not there any more: its backend was closed")
        await self._snapshots.save(snapshot, path)

    async def load(self, path: Path) -> Snapshot:
        """A snapshot from a file that `save` wrote. Its content is untrusted: it reaches nothing but sandboxes.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no saved snapshot, or it is damaged.
        """
        await self._ready()
        assert self._snapshots is not None
        return await self._snapshots.load(path)

    async def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Sandboxes that started from it go on. Idempotent; raises nothing."""
        if self._snapshots is not None:
            self._snapshots.drop(snapshot)

    def _on_ended(self, name: str | None, reason: str) -> None:
        for ended in list(self._sandboxes) if name is None else [name]:
            sandbox = self._sandboxes.pop(ended, None)
            if sandbox is not None:
                sandbox.ended(reason)
            self._online.discard(ended)
            if self.proxy is not None:
                self.proxy.detach(ended)
            layers = self._layers.pop(ended, ())
            if self._snapshots is not None:
                self._snapshots.release(layers)

    def heed_network(self) -> None:
        """Hear of outages that have been by now. Raises nothing."""
        if self.proxy is not None:
            self.proxy.heed()

    def _on_outage(self, name: str | None, reason: str) -> None:
        """What runs now may see a broken network, and take it for an answer: it cannot go on."""
        for each in list(self._online) if name is None else [name]:
            if each in self._sandboxes:
                self._sandboxes[each].ended(reason)
                if self._server is not None:
                    with contextlib.suppress(OSError):
                        self._server.stop(each)

    async def close(self) -> None:
        """Stop every sandbox this backend started. Idempotent; raises nothing."""
        server, self._server, self._snapshots = self._server, None, None
        if server is not None:
            server.attach()
            server.close()
        if self.proxy is not None:
            self.proxy.close()
        self._clean_up()

    def _clean_up(self) -> None:
        groups, self._groups = self._groups, None
        state_, self._state = self._state, None
        if state_ is not None:
            state.remove_leftovers(str(state_.folder), [str(folder) for folder in groups.folders] if groups else [])
            state_.remove()

    def check(self) -> list[Finding]:
        """What this machine has and lacks for this backend. Starts and stops one real sandbox; raises nothing."""
        from envs.egress.client import finding

        return [*checks.check(self.run_label, self._trial), finding(required=self.proxy is not None)]

    async def _trial(self) -> None:
        """Start a sandbox of a backend like this one, its folders and its network included, and run a command in it."""
        trial = BubblewrapBackend(f"{self.run_label}-check", **self._arguments)
        try:
            sandbox = await trial.start({}, SandboxLimits())
            command = "python3 -m pytest --version" if self.python else "true"
            result = await sandbox.shell(command)
            if result.exit_code != 0:
                raise SandboxError(f"{command!r} ended with {result.exit_code} in a sandbox: {result.output!r}")
        finally:
            await trial.close()

    async def audit(self) -> list[Finding]:
        """What gives a sandbox away to a program in it that looks closely; see `composer.contract.SandboxBackend`.

        Raises:
            SandboxStartError: it could not start.
            SandboxError: it failed under the probe.
        """
        sandbox = await self.start({}, SandboxLimits())
        try:
            return await realism.audit(sandbox)
        finally:
            await sandbox.stop()

    def sweep(self) -> int:
        """Remove what killed runs left behind (processes, cgroups, folders); never touches a live run's.

        Returns:
            How many leftovers were removed.
        """
        return state.sweep()


def _hint() -> str:
    """What most likely keeps namespaces from being made."""
    finding = checks.namespaces()
    if finding.ok:
        return checks.CONTAINER_REMEDY
    return f"{finding.detail}; {finding.remedy}"
