"""One running container, as its owner holds it: from its start to its removal, one call at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import docker

from composer.contract import ExecResult, SandboxLimits, SandboxStats, Snapshot
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import container as containers
from envs.sandbox.docker import files, owner, scenery, usage, verify
from envs.sandbox.docker.commands import Commands, shown
from envs.sandbox.docker.container import Settings
from envs.sandbox.docker.engine import Engine, EngineRefusal
from envs.sandbox.docker.execution import unsayable
from envs.sandbox.docker.inside import ARCHIVE_S, Inside
from envs.sandbox.docker.snapshots import SnapshotStore, TooMuchError

if TYPE_CHECKING:
    from envs.sandbox.docker.network import Online

log = logging.getLogger(__name__)

_REMOVED_S = 60.0


class DockerSandbox:
    """Keeps `composer.contract.Sandbox`; made by `DockerBackend.start`."""

    def __init__(
        self,
        id: str,
        name: str,
        keep: Callable[[BinaryIO], Snapshot],
        settings: Settings,
        limits: SandboxLimits,
        engine: Engine,
        snapshots: SnapshotStore,
        fork: Callable[[Snapshot, SandboxLimits], Awaitable[DockerSandbox]],
        on_stopped: Callable[[str], None],
        heed_network: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing has started.

        Args:
            id: for messages.
            name: of the container.
            keep: makes a snapshot of an archive of this sandbox's files.
            settings: of the backend.
            limits: of this sandbox.
            engine: runs the container.
            snapshots: takes those of this sandbox.
            fork: starts a sandbox from a snapshot.
            on_stopped: called with the container's name when nothing of it is left.
            heed_network: called before an answer counts: it calls `lose` of sandboxes that have seen an outage by now.
        """
        self.id, self.name, self.workdir = id, name, settings.workdir
        self._keep, self._settings, self._limits = keep, settings, limits
        self._engine, self._snapshots, self._fork, self._on_stopped = engine, snapshots, fork, on_stopped
        self._inside = Inside(id, name, engine, limits.lifetime_s)
        self._commands = Commands(self._inside, engine, limits, settings.workdir)
        self._lock = asyncio.Lock()
        self._most_memory = 0
        self._is_given_up = False
        self._lost = ""
        self._heed_network = heed_network
        self._online: Online | None = None
        self._creating: asyncio.Future[tuple[list[str], dict[str, Any]]] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def begin(
        self,
        prepared: str,
        skeleton: bytes,
        labels: dict[str, str],
        base: tuple[BinaryIO, int] | None,
        contents: Mapping[str, bytes],
        online: Online | None = None,
    ) -> None:
        """Start the container, see that its limits hold, and fill it.

        Args:
            prepared: the image's name on the engine.
            skeleton: a command that fills the places that can be written to.
            labels: of the container.
            base: an archive that takes the skeleton's place, and its size.
            contents: path -> content of the first files.
            online: what its network takes; None: it has none.

        Raises:
            SandboxStartError: something did not work, or a limit does not hold.
            SandboxError: the engine does not answer.
        """

        def start(client: docker.APIClient) -> tuple[list[str], dict[str, Any]]:
            trusted = online.variables if online is not None else None
            warnings = containers.create(client, prepared, self.name, self._settings, self._limits, labels, trusted)
            if not self._is_given_up:
                client.start(self.name)
            if self._is_given_up:  # and nobody is there any more to remove it
                owner.remove(client, self.name)
            return warnings, client.inspect_container(self.name)

        self._inside.is_starting()
        # What a thread has begun goes on; `_stop` waits for it.
        self._creating = asyncio.ensure_future(self._engine.call("start a container", start, 3 * self._engine.answer_s))
        # Nobody may wait for it any more when it fails.
        self._creating.add_done_callback(lambda done: done.cancelled() or done.exception())
        warnings, inspected = await asyncio.shield(self._creating)
        for warning in warnings:
            log.debug("container %s: %s", self.name, warning)
        verify.check_container(inspected, self._settings, self._limits)
        await self._inside.begin(scenery.name_of_first(self._settings.profile))
        _, said = await self._inside.ask(verify.INSIDE)
        swap = inspected["HostConfig"].get("MemorySwap")
        self._inside.has_bash = verify.check_inside(said, self._settings, self._limits, swap)
        if online is not None:
            self._online = online
            code, said = await self._inside.ask_root(
                files.unpack_command(len(online.certificates)), online.certificates
            )
            if code:
                raise SandboxStartError(f"sandbox {self.id} cannot be made to trust the egress proxy: {shown(said)}")
            await online.network.begin(online.image, self._limits, labels)
        if base is not None:
            await self._unpack(*base)
        elif skeleton:
            code, said = await self._inside.ask(skeleton, timeout_s=ARCHIVE_S)
            if code:
                raise SandboxStartError(f"what the image holds in its working directory does not fit: {shown(said)}")
        await self._unpack(*await asyncio.to_thread(files.archive, contents, self.workdir))

    async def _unpack(self, file: BinaryIO, size: int) -> None:
        with file:
            code, said = await self._inside.ask(files.unpack_command(size), (file, size), ARCHIVE_S)
        if code:
            lines = [line for line in said.decode(errors="replace").splitlines() if ": " in line]
            # "tar: <path>: Cannot <do this>: <why>", of which the first is not yet a consequence.
            _, _, what = (lines or ["tar: nothing was said"])[0].partition(": ")
            path, _, why = what.partition(": ")
            if why.startswith("Wrote only"):  # so GNU tar says it
                why = os.strerror(errno.ENOSPC)
            if not path.startswith("/"):
                path = f"/{path}".removeprefix(f"{self.workdir}/")
            raise SandboxStartError(f"sandbox {self.id}: file {_shortened(path)!r} cannot be written: {why}")

    async def shell(self, command: str, timeout_s: float | None = None) -> ExecResult:
        """Run a command line in the persistent shell: `cd` and variables last.

        A command that outlives its deadline is killed with its children and with the shell; the next call gets a
        new shell, in the directory where the last command had ended, without its variables.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        data = _encoded(command)
        if b"\0" in data:
            self._check()
            return ExecResult(2, b"bash: a command cannot contain a NUL byte\n")
        async with self._turn("shell"):
            return await self._commands.in_shell(data, timeout_s)

    async def directory(self) -> str:
        """Where the persistent shell is, or would begin: asked of the kernel, not of the shell.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        async with self._turn("directory"):
            return os.fsdecode(await self._commands.directory())

    async def enter(self, directory: str) -> None:
        """Have the persistent shell begin in a directory; one that has begun stays where it is.

        Raises:
            FileNotFoundError: there is no such directory.
            SandboxError: the sandbox is gone or does not answer.
        """
        async with self._turn("enter"):
            if not await self._commands.enter(os.fsencode(directory)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        channel: socket | None = None,
    ) -> ExecResult:
        """Run one program, without a shell, in a fresh process in `workdir`; see `composer.contract.Sandbox`.

        The engine starts it and knows its exit code; what it is told are texts, so a word that is no text ends with
        126, as one with a NUL does.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        with channel or contextlib.nullcontext():
            if reason := unsayable([*argv, *(f"{name}={value}" for name, value in (env or {}).items())]):
                self._check()
                return ExecResult(126, f"{reason}\n".encode())
            async with self._turn("exec"):
                if channel is not None:
                    channel.setblocking(False)
                return await self._commands.run(argv, stdin, env or {}, timeout_s, channel)

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Read a file (at most `max_bytes` of it) as the sandbox's user.

        Raises:
            FileNotFoundError: no such file.
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not read it, or it is a pipe or a socket.
            SandboxError: the sandbox is gone or does not answer.
        """
        async with self._turn("read"):
            command = files.read_command(self._path(path), max_bytes)
            code, text = await self._inside.ask(command, most=max(max_bytes, 2**16))
        if code == 0:
            return text
        error = files.error_of(code, text, path)
        if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
            raise error
        raise FileNotFoundError(error.errno, error.strerror, path)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, making its folders.

        Raises:
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not write it, or it lies on a read-only file system.
            OSError: a limit was hit (ENOSPC, EFBIG), or the path cannot be one.
            SandboxError: the sandbox is gone or does not answer.
        """
        if len(content) > self._limits.file_bytes:
            self._check()
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        async with self._turn("write"):
            command = files.write_command(self._path(path), len(content))
            code, text = await self._inside.ask(command, (io.BytesIO(content), len(content)), ARCHIVE_S)
        if code:
            error = files.error_of(code, text, path)
            if error.errno == errno.EROFS:
                raise PermissionError(error.errno, error.strerror, path)
            raise error

    async def files(self, max_bytes: int = 2**20) -> dict[str, bytes]:
        """Every regular file under `workdir` that its user may read, path relative to it -> content.

        Raises:
            OSError: the files, names included, add up to more than `max_bytes`, or they are too many or too deep to be
                written again (EFBIG); or `workdir` is no folder any more.
            SandboxError: the sandbox is gone or does not answer.
        """
        # Headers and names come on top of the contents; a disk holds so many entries.
        most = 2 * max_bytes + 2**20 + 2048 * (self._limits.disk_bytes // 4096)
        with tempfile.SpooledTemporaryFile(2**23) as spooled:
            file = cast(BinaryIO, spooled)
            async with self._turn("files"):
                for is_last in (False, True):
                    try:
                        code = await self._inside.pack(files.collect_command(self.workdir), file, most)
                    except TooMuchError as e:
                        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.workdir) from e
                    except OSError as e:  # our own disk is full: whatever is in the sandbox, it is not to blame
                        raise SandboxError(f"sandbox {self.id} could not collect its files here: {e}") from e
                    if code == files.IS_FOLDER:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.workdir)
                    file.seek(0)
                    try:
                        return await asyncio.to_thread(files.collected, file, self.workdir, max_bytes)
                    except ValueError as e:
                        if is_last:
                            raise SandboxError(f"sandbox {self.id} could not collect its files: {e}") from e
                        # Something of the user's has been at it.
                        await self._inside.kill(set())
        raise AssertionError("the second attempt ends in one way or another")

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now: those that the sandbox's user may read, with their modes and times.

        Raises:
            OSError: ENOSPC, EMFILE: there is no room for another snapshot.
            SandboxError: the sandbox is gone or does not answer.
        """
        file = self._snapshots.new_file()
        try:
            async with self._turn("snapshot"):
                most = 2 * self._limits.disk_bytes + 2048 * (self._limits.disk_bytes // 4096)
                await self._inside.pack(files.pack_command(self._settings.kept_places), file, most)
            file.flush()
        except BaseException:
            file.close()
            raise
        return self._keep(file)

    async def fork(self) -> DockerSandbox:
        """A second sandbox, with the limits of this one, that starts from its files as they are now.

        Raises:
            OSError: ENOSPC, EMFILE: there is no room for another snapshot.
            SandboxError: the sandbox is gone or does not answer.
            SandboxStartError: the second one could not start.
        """
        snapshot = await self.snapshot()
        try:
            return await self._fork(snapshot, self._limits)
        finally:
            self._snapshots.drop(snapshot)

    async def stats(self) -> SandboxStats:
        """What was used so far.

        With control groups version 2 behind a profile that has a /sys of its own, the peak of the memory is the most
        that was seen by this call: no engine knows it better.

        Raises:
            SandboxError: the sandbox is gone.
        """
        async with self._turn("stats"):
            values = usage.parse(await self._inside.ask_control(usage.command()))
            used = usage.of_groups(values)
            if used is None:
                try:
                    said = await self._engine.call("measure a container", lambda client: _stats(client, self.name))
                except EngineRefusal as e:
                    raise await self._inside.loss(str(e)) from e
                used = usage.of_engine(said)
        self._most_memory = max(self._most_memory, used[0])
        num_processes = max(0, values.get("processes", 0) - self._inside.num_own_processes)
        return SandboxStats(self._most_memory, used[1], num_processes)

    async def stop(self) -> None:
        """End every process and remove every trace. Idempotent; raises nothing."""
        if self._stopping is None or self._stopping.get_loop().is_closed():
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    @property
    def is_online(self) -> bool:
        """Whether it has a network."""
        return self._online is not None

    def lose(self, reason: str) -> None:
        """What it reaches outside has failed: it cannot go on. Raises nothing."""
        self._inside.reason = self._inside.reason or reason
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        self._is_given_up = True
        self._inside.reason = self._inside.reason or "it was stopped"
        self._inside.close()
        self._commands.close()
        if self._creating is not None:
            await asyncio.wait([self._creating])
        deadline = time.monotonic() + _REMOVED_S
        try:
            if self._online is not None:
                await self._online.network.close()
            while await self._remove() and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        except SandboxError as e:
            log.warning("sandbox %s is left to end with its lifetime: %s", self.id, e)
        self._on_stopped(self.name)

    async def _remove(self) -> bool:
        """Remove the container; whether it is still there, since it may be removing itself."""
        await self._engine.call("remove a container", lambda client: owner.remove(client, self.name))
        try:
            await self._engine.call("look at a container", lambda client: client.inspect_container(self.name))
        except EngineRefusal as e:
            if e.status == 404:
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        """One call at a time."""
        async with self._lock:
            self._check()
            try:
                yield
                # What a program made of an outage is no answer of its own.
                self._heed_network()
                self._check()
            except asyncio.CancelledError:
                # Its answer would be taken for the next call's.
                self._lost = f"a call of {what!r} was cancelled"
                raise

    def _check(self) -> None:
        if self._lost:
            self._inside.reason = self._inside.reason or self._lost
        self._inside.check()

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path if path.startswith("/") else f"{self.workdir}/{path}"


def _encoded(text: str) -> bytes:
    """A text as bytes: names that are no UTF-8 as they were, and anything else that cannot be said as it can."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def _shortened(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:60]}...{path[-40:]}"


def _stats(client: docker.APIClient, name: str) -> dict[str, Any]:
    # Without `one_shot` the engine takes a second reading a second later. Old ones take one a second for all who ask.
    return cast(dict[str, Any], client.stats(name, stream=False, one_shot=True))
