"""One running container, as its owner holds it: the commands of the model and of graders, files, snapshots."""

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
from typing import Any, BinaryIO, cast

import docker

from composer.contract import ExecResult, SandboxLimits, SandboxStats, Snapshot
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import container as containers
from envs.sandbox.docker import files, owner
from envs.sandbox.docker.container import Settings
from envs.sandbox.docker.engine import Engine, EngineRefusal
from envs.sandbox.docker.execution import Execution, unsayable
from envs.sandbox.docker.inside import ANSWER_S, ARCHIVE_S, KILLED, USER, Inside, NotStartedError, no_program
from envs.sandbox.docker.shell import Ended, PersistentShell, ShellEndedError, quoted
from envs.sandbox.docker.snapshots import SnapshotStore
from envs.sandbox.programs import TIMED_OUT, OutputBuffer

log = logging.getLogger(__name__)

_KILLED_S = 5.0
"""For what was killed to have ended."""
_REMOVED_S = 60.0
_USAGE = b"""\
for f in memory.peak memory/memory.max_usage_in_bytes memory.current cpuacct/cpuacct.usage; do
    [ -r "/sys/fs/cgroup/$f" ] && read -r v <"/sys/fs/cgroup/$f" && printf '%s %s\\n' "$f" "$v"
done
[ -r /sys/fs/cgroup/cpu.stat ] && while read -r n v; do printf '%s %s\\n' "$n" "$v"; done </sys/fs/cgroup/cpu.stat
set -- /proc/[0-9]*; printf 'processes %s\\n' $#"""


class DockerSandbox:
    """Keeps `composer.contract.Sandbox`; made by `DockerBackend.start`."""

    def __init__(
        self,
        id: str,
        name: str,
        image: str,
        settings: Settings,
        limits: SandboxLimits,
        engine: Engine,
        snapshots: SnapshotStore,
        fork: Callable[[Snapshot, SandboxLimits], Awaitable[DockerSandbox]],
        on_stopped: Callable[[str], None],
    ) -> None:
        """Nothing has started.

        Args:
            id: for messages.
            name: of the container.
            image: as the task names it.
            settings: of the backend.
            limits: of this sandbox.
            engine: runs the container.
            snapshots: takes those of this sandbox.
            fork: starts a sandbox from a snapshot.
            on_stopped: called with the container's name when nothing of it is left.
        """
        self.id, self.name, self.workdir = id, name, settings.workdir
        self._image, self._settings, self._limits = image, settings, limits
        self._engine, self._snapshots, self._fork, self._on_stopped = engine, snapshots, fork, on_stopped
        self._inside = Inside(id, name, engine, limits.lifetime_s)
        self._lock = asyncio.Lock()
        self._shell: PersistentShell | None = None
        self._directory = os.fsencode(settings.workdir)
        self._lost = ""
        self._creating: asyncio.Future[tuple[list[str], dict[str, Any]]] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def begin(
        self,
        prepared: str,
        skeleton: bytes,
        labels: dict[str, str],
        base: tuple[BinaryIO, int] | None,
        contents: Mapping[str, bytes],
    ) -> None:
        """Start the container, see that its limits hold, and fill it.

        Args:
            prepared: the image's name on the engine.
            skeleton: a command that fills the places that can be written to.
            labels: of the container.
            base: an archive that takes the skeleton's place, and its size.
            contents: path -> content of the first files.

        Raises:
            SandboxStartError: something did not work, or a limit does not hold.
            SandboxError: the engine does not answer.
        """

        def start(client: docker.APIClient) -> tuple[list[str], dict[str, Any]]:
            warnings = containers.create(client, prepared, self.name, self._settings, self._limits, labels)
            client.start(self.name)
            return warnings, client.inspect_container(self.name)

        self._inside.is_starting()
        # What a thread has begun goes on; `_stop` waits for it.
        self._creating = asyncio.ensure_future(self._engine.call("start a container", start, 3 * self._engine.answer_s))
        warnings, inspected = await asyncio.shield(self._creating)
        for warning in warnings:
            log.debug("container %s: %s", self.name, warning)
        containers.check_container(inspected, self._settings, self._limits)
        await self._inside.begin()
        _, shown = await self._inside.ask(containers.INSIDE)
        self._inside.has_bash = containers.check_inside(shown, self._settings, self._limits)
        if base is not None:
            await self._unpack(*base)
        elif skeleton:
            code, said = await self._inside.ask(skeleton, timeout_s=ARCHIVE_S)
            if code:
                raise SandboxStartError(f"what the image holds in its working directory does not fit: {_shown(said)}")
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
            shell = await self._usable_shell()
            began = time.monotonic()
            deadline = began + (self._limits.exec_timeout_s if timeout_s is None else timeout_s)
            output = OutputBuffer(self._limits.output_bytes)
            timed_out = False
            try:
                ended = await shell.run(data, output.add, deadline)
            except TimeoutError:
                timed_out = True
                ended = await self._end_shell(shell, output, True)
            except ShellEndedError:
                ended = await self._end_shell(shell, output, False)
            self._directory = ended.directory
            return ExecResult(ended.exit_code, output.value(), timed_out, output.truncated, time.monotonic() - began)

    async def _usable_shell(self) -> PersistentShell:
        if self._shell is not None and not await self._shell.is_usable():
            self._shell.stream.close()
            self._shell = None
        if self._shell is not None:
            return self._shell
        # The engine cannot start it there: the directory may be gone, and its name be no text.
        where = b"cd -- %b || cd -- %b" % (quoted(self._directory), quoted(self.workdir))
        for _ in range(2):
            shell = await self._inside.persistently(lambda: self._inside.open_shell(USER, report=True))
            try:
                await shell.run(where, len, time.monotonic() + ANSWER_S)
            except (ShellEndedError, TimeoutError):
                shell.stream.close()
                await self._inside.kill(set())  # what may have been in its way
            else:
                self._shell = shell
                return shell
        raise await self._inside.loss("its shell does not start")

    async def _end_shell(self, shell: PersistentShell, output: OutputBuffer, is_late: bool) -> Ended:
        """Collect a shell that has ended, or has to. Its successor starts in the directory of the last command."""
        self._shell = None
        running = Execution(self._engine, shell.stream, output, 0.0)
        # What earlier commands left running stays, as after Ctrl-C in a terminal.
        earlier = set(shell.processes[1:]) - set(shell.processes[:1])
        if is_late:
            await self._inside.kill(earlier)
        code = await self._end_of(running)
        if code is None:
            await self._inside.kill(earlier)
            code = await self._end_of(running)
        await running.last_words()
        shell.stream.close()
        if code is None:
            raise await self._inside.loss("a shell of it would not end")
        if code == KILLED:
            await self._inside.ask_control(b":")  # or the kernel has killed it with everything else
        return Ended(TIMED_OUT if is_late else code, self._directory)

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
                return await self._exec(argv, stdin, env or {}, timeout_s, channel)

    async def _exec(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_s: float | None, channel: socket | None
    ) -> ExecResult:
        began = time.monotonic()
        if channel is not None:
            channel.setblocking(False)
        output = OutputBuffer(self._limits.output_bytes)
        for _ in range(2):
            before = await self._inside.processes()
            deadline = time.monotonic() + (self._limits.exec_timeout_s if timeout_s is None else timeout_s)
            output = OutputBuffer(self._limits.output_bytes)
            try:
                stream = await self._inside.persistently(
                    lambda: self._engine.open(
                        self.name,
                        argv,
                        user=USER,
                        stdin=bool(stdin) or channel is not None,
                        environment=env,
                        workdir=self.workdir,
                    )
                )
                program = Execution(self._engine, stream, output, deadline)
                try:
                    code = await self._run(program, argv[0], stdin, channel, before)
                finally:
                    stream.close()
                if not program.never_started:
                    timed_out = code is None
                    seconds = time.monotonic() - began
                    return ExecResult(
                        TIMED_OUT if code is None else code, output.value(), timed_out, output.truncated, seconds
                    )
                if (error := no_program(output.value().decode(errors="replace"))) is not None:
                    raise error
            except NotStartedError as e:
                return ExecResult(e.exit_code, f"{argv[0]}: {e}\n".encode(), seconds=time.monotonic() - began)
            # There was no room for it: too many processes, or no memory left.
            await self._inside.kill(set())
            if channel is not None:
                break  # of which something may have been read already
        raise await self._inside.loss(f"{argv[0]!r} could not be started: {_shown(output.value())}")

    async def _run(
        self, program: Execution, name: str, stdin: bytes, channel: socket | None, before: set[int]
    ) -> int | None:
        try:
            code = await program.run(stdin, channel)
            if code is None:
                await self._inside.kill(before)
                if await self._end_of(program) is None:
                    raise await self._inside.loss(f"{name!r} would not end")
                await program.last_words()
            elif code == KILLED:
                await self._inside.ask_control(b":")  # or the kernel has killed it with everything else
        except EngineRefusal as e:
            raise await self._inside.loss(str(e)) from e
        return code

    async def _end_of(self, program: Execution) -> int | None:
        try:
            return await program.end(time.monotonic() + _KILLED_S)
        except EngineRefusal as e:
            raise await self._inside.loss(str(e)) from e

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
                    except OSError as e:
                        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.workdir) from e
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
        return self._snapshots.add(file, self._image)

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

        Raises:
            SandboxError: the sandbox is gone.
        """
        async with self._turn("stats"):
            lines = (await self._inside.ask_control(_USAGE)).decode(errors="replace").splitlines()
        values = dict(line.split(" ", 1) for line in lines if " " in line)

        def first(*names: str) -> int:
            return next((int(values[name]) for name in names if values.get(name, "").strip().isdigit()), 0)

        cpu_seconds = first("usage_usec") / 1e6 if "usage_usec" in values else first("cpuacct/cpuacct.usage") / 1e9
        return SandboxStats(
            first("memory.peak", "memory/memory.max_usage_in_bytes", "memory.current"),
            cpu_seconds,
            max(0, first("processes") - self._inside.num_own_processes),
        )

    async def stop(self) -> None:
        """End every process and remove every trace. Idempotent; raises nothing."""
        if self._stopping is None or self._stopping.get_loop().is_closed():
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._inside.reason = self._inside.reason or "it was stopped"
        self._inside.close()
        if self._shell is not None:
            self._shell.stream.close()
        if self._creating is not None:
            await asyncio.wait([self._creating])
        deadline = time.monotonic() + _REMOVED_S
        try:
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


def _shown(output: bytes) -> str:
    return " ".join(output[-300:].decode(errors="replace").split())


def _shortened(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:60]}...{path[-40:]}"
