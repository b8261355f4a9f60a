"""One running bubblewrap sandbox, as its owner holds it: every call is one frame to the supervisor and one back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from composer.contract import ExecResult, SandboxLimits, SandboxStats, Snapshot
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox import frames, warm
from envs.sandbox.control import ForkServerClient
from envs.sandbox.limits import OVERHEAD_PROCESSES, ControlGroup

_ANSWER_S = 15.0
"""For the supervisor to answer, on top of the command's own deadline."""
_COLLECT_S = 45.0
"""For the files of a sandbox to be read, on top of that: there may be many."""
_END_S = 10.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Keeper(Protocol):
    """What a sandbox needs of the backend that started it."""

    async def keep(self, name: str, limits: SandboxLimits) -> Snapshot:
        """Make a snapshot of the sandbox `name`, which has these limits."""
        ...

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> BubblewrapSandbox:
        """See `composer.contract.SandboxBackend`."""
        ...

    async def drop(self, snapshot: Snapshot) -> None:
        """See `composer.contract.SandboxBackend`."""
        ...

    def heed_network(self) -> None:
        """End sandboxes that have seen an outage of the network by now."""
        ...


class BubblewrapSandbox:
    """Keeps `composer.contract.Sandbox`; made by `BubblewrapBackend.start`."""

    def __init__(
        self,
        id: str,
        name: str,
        workdir: str,
        limits: SandboxLimits,
        server: ForkServerClient,
        channel: socket.socket,
        group: ControlGroup | None,
        keeper: Keeper,
        num_sleepers: int,
        python: bool,
    ) -> None:
        """The fork server is about to be asked for it.

        Args:
            id: shown in messages.
            name: by which the fork server knows it.
            workdir: see `composer.contract.Sandbox`.
            limits: of this sandbox.
            server: the fork server.
            channel: to the supervisor.
            group: its control groups, if there are any.
            keeper: the backend.
            num_sleepers: processes that belong to the profile.
            python: whether the fork server has imported pytest.
        """
        self.id, self.workdir = id, workdir
        self._name, self._limits, self._server, self._channel, self._group = name, limits, server, channel, group
        self._keeper, self._python = keeper, python
        self._num_own = OVERHEAD_PROCESSES - 1 + num_sleepers
        self._warm: socket.socket | None = None
        """Channel to the second supervisor, which has pytest; it is there from the first command for it on."""
        self._waiting: list[asyncio.Future[None]] = []
        self._reason, self._lost = "", ""
        self._is_busy = False
        self._stopping: asyncio.Task[None] | None = None
        channel.setblocking(False)

    async def wait_until_started(self, files: Mapping[str, bytes]) -> None:
        """Wait for the supervisor, and have it write the first files.

        Raises:
            SandboxStartError: the sandbox did not come up, or the files do not fit into it.
        """
        listing = [(path, len(content)) for path, content in files.items()]
        try:
            # The files travel while the sandbox is still being built.
            answer, _ = await self._exchange({"op": "populate", "files": listing}, b"".join(files.values()))
        except OSError as e:
            await self._wait_for_end(1.0)
            raise SandboxStartError(f"sandbox {self.id} could not start: {self._reason or e}") from e
        if "error" in answer:
            raise SandboxStartError(f"sandbox {self.id} could not start: {answer['error']}")
        if number := answer.get("errno"):
            raise SandboxStartError(
                f"sandbox {self.id}: file {answer['path']!r:.160} cannot be written: {os.strerror(number)}"
            )

    async def shell(self, command: str, timeout_s: float | None = None) -> ExecResult:
        """Run a command line in the persistent shell: `cd` and variables last.

        A command that outlives its deadline is killed with its children and the shell; the next call gets a new one, in
        the directory where the last command had ended, without its variables.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        return await self._command({"op": "shell"}, command.encode(errors="surrogateescape"), timeout_s)

    async def directory(self) -> str:
        """Where the persistent shell is, or would begin: asked of the kernel, not of the shell.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        answer, _ = await self._ask({"op": "directory"})
        return answer["path"]

    async def enter(self, directory: str) -> None:
        """Have the persistent shell begin in a directory; one that has begun stays where it is.

        Raises:
            FileNotFoundError: there is no such directory.
            SandboxError: the sandbox is gone or does not answer.
        """
        answer, _ = await self._ask({"op": "enter", "path": directory})
        if answer.get("errno"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        channel: socket.socket | None = None,
    ) -> ExecResult:
        """Run one program, without a shell, in a fresh process in `workdir`; see `composer.contract.Sandbox`.

        `python3 -m pytest ...` is answered by a fork of a process that has imported pytest already (warm.py).

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        request = {"op": "exec", "argv": list(argv), "env": dict(env or {})}
        with channel or contextlib.nullcontext():
            through = self._warm_up() if self._python and warm.serves(argv, request["env"]) else None
            fd = -1 if channel is None else channel.fileno()
            return await self._command(request, stdin, timeout_s, fd, through)

    def _warm_up(self) -> socket.socket:
        """The channel to the second supervisor.

        Raises:
            SandboxError: the sandbox is gone.
        """
        self._check()
        if self._warm is None:
            ours, theirs = socket.socketpair()
            fds = [theirs.fileno()]
            try:
                if self._group is not None:
                    self._group.allow_another()
                    fds += [*self._group.open_for_attach(), self._group.open_members()]
                self._server.warm(self._name, fds)
            except OSError as e:
                ours.close()
                raise self._gone() from e
            finally:
                for fd in fds[1:]:
                    os.close(fd)
                theirs.close()
            ours.setblocking(False)
            self._warm = ours
            self._num_own += 1
        return self._warm

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Read a file (at most `max_bytes` of it) as the sandbox's user.

        Raises:
            FileNotFoundError: no such file.
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not read it, or it is a pipe or a socket.
            SandboxError: the sandbox is gone or does not answer.
        """
        answer, body = await self._ask({"op": "read", "path": path, "max_bytes": max_bytes})
        if number := answer.get("errno"):
            error = OSError(number, os.strerror(number), path)
            if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
                raise error
            raise FileNotFoundError(number, os.strerror(number), path)
        return body

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, making its folders.

        Raises:
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not write it, or it lies on a read-only file system.
            OSError: a limit was hit (ENOSPC, EFBIG), or the path cannot be one.
            SandboxError: the sandbox is gone or does not answer.
        """
        answer, _ = await self._ask({"op": "write", "path": path}, content)
        if number := answer.get("errno"):
            if os.strerror(number) == os.strerror(30):
                raise PermissionError(number, os.strerror(number), path)
            raise OSError(number, os.strerror(number), path)

    async def files(self, max_bytes: int = 2**20) -> dict[str, bytes]:
        """Every regular file under `workdir` that its user may read, path relative to it -> content.

        Raises:
            OSError: the files, names included, add up to more than `max_bytes`, or they are too many or too deep to be
                written again (EFBIG); or `workdir` is no folder any more.
            SandboxError: the sandbox is gone or does not answer.
        """
        answer, body = await self._ask({"op": "files", "max_bytes": max_bytes}, timeout_s=_COLLECT_S)
        if number := answer.get("errno"):
            raise OSError(number, os.strerror(number), self.workdir)
        found, start = {}, 0
        for path, size in answer["files"]:
            found[path] = body[start : start + size]
            start += size
        return found

    async def snapshot(self) -> Snapshot:
        """Keep the file system as it is now: a copy of what the sandbox has written since it started.

        Raises:
            OSError: ENOSPC: the snapshots of this backend would be over `snapshot_bytes`; E2BIG: more than 100,000
                files, or deeper than 1000 folders.
            SandboxError: the sandbox is gone or does not answer.
        """
        self._check()
        try:
            return await self._keeper.keep(self._name, self._limits)
        except OSError as e:
            if self._reason or e.errno not in _NO_ROOM:
                await self._wait_for_end(1.0)
                raise SandboxError(f"sandbox {self.id} could not be copied: {self._reason or e}") from e
            raise

    async def fork(self) -> BubblewrapSandbox:
        """A second sandbox, with the limits of this one, that starts from its files as they are now.

        Raises:
            OSError: as of `snapshot`.
            SandboxError: the sandbox is gone or does not answer.
            SandboxStartError: the second one could not start.
        """
        snapshot = await self.snapshot()
        try:
            return await self._keeper.start({}, self._limits, base=snapshot)
        finally:
            await self._keeper.drop(snapshot)

    async def stats(self) -> SandboxStats:
        """What was used so far.

        Raises:
            SandboxError: the sandbox is gone.
        """
        self._check()
        if self._group is None:
            answer, _ = await self._ask({"op": "stats"})
            return SandboxStats(answer["peak_memory_bytes"], answer["cpu_seconds"], answer["num_processes"])
        try:
            usage = self._group.usage()
        except OSError as e:
            raise self._gone() from e
        return SandboxStats(usage.peak_memory_bytes, usage.cpu_seconds, max(0, usage.num_processes - self._num_own))

    async def stop(self) -> None:
        """End every process and remove every trace. Idempotent; raises nothing."""
        if self._stopping is None or self._stopping.get_loop().is_closed():
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if not self._reason:
            self._server.attach()
            with contextlib.suppress(OSError):
                self._server.stop(self._name)
                await self._wait_for_end(_END_S)
        self.ended("it was stopped")
        # The last process may still be on its way out of its group.
        for _ in range(200):
            if self._group is None or self._group.remove():
                break
            await asyncio.sleep(0.005)

    def ended(self, reason: str) -> None:
        """Nothing of the sandbox is left: remember why, wake who waits, and let go of what the host held."""
        if self._reason:
            return
        self._reason = reason
        if self._group is not None:
            self._group.remove()
        # A call that waits is woken by the end of the stream; closing the descriptor would leave it waiting for ever.
        for channel in self._channels():
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        if not self._is_busy:
            self._close()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)

    async def _wait_for_end(self, timeout_s: float) -> None:
        if self._reason:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await future

    def _channels(self) -> list[socket.socket]:
        return [self._channel, *([self._warm] if self._warm is not None else [])]

    def _close(self) -> None:
        for channel in self._channels():
            channel.close()

    async def _command(
        self,
        request: dict[str, Any],
        body: bytes,
        timeout_s: float | None,
        fd: int = -1,
        through: socket.socket | None = None,
    ) -> ExecResult:
        timeout = self._limits.exec_timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        answer, output = await self._ask(request | {"timeout_s": timeout}, body, timeout, fd, through)
        if number := answer.get("errno"):
            raise SandboxError(f"sandbox {self.id} could not run a command: {os.strerror(number)}")
        if self._group is not None and self._group.was_robbed():  # it would look as if the command had failed
            self._lost = "the machine's memory ran out, and the kernel killed a program that was within its own limit"
            raise self._gone()
        return ExecResult(
            answer["exit_code"], output, answer["timed_out"], answer["truncated"], time.monotonic() - began
        )

    async def _ask(
        self,
        request: dict[str, Any],
        body: bytes = b"",
        timeout_s: float = 0.0,
        fd: int = -1,
        through: socket.socket | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        self._check()
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                answer, payload = await self._exchange(request, body, fd, through)
        except TimeoutError as e:
            self._lost = f"it did not answer {request['op']!r} within {timeout_s + _ANSWER_S:g} s"
            raise self._gone() from e
        except (OSError, ConnectionError) as e:
            await self._wait_for_end(1.0)
            raise self._gone() from e
        except asyncio.CancelledError:
            # Its answer would be taken for the next call's.
            self._lost = f"a call of {request['op']!r} was cancelled"
            raise
        if "error" in answer:
            raise SandboxError(f"sandbox {self.id} could not do {request['op']!r}: {answer['error']}")
        # What a program made of an outage is no answer of its own.
        self._keeper.heed_network()
        self._check()
        return answer, payload

    async def _exchange(
        self, request: dict[str, Any], body: bytes, fd: int = -1, through: socket.socket | None = None
    ) -> tuple[dict[str, Any], bytes]:
        self._is_busy = True
        try:
            return await frames.exchange(through or self._channel, request, body, fd)
        finally:
            self._is_busy = False
            if self._reason:
                self._close()

    def _check(self) -> None:
        if self._reason or self._lost:
            raise self._gone()

    def _gone(self) -> SandboxError:
        return SandboxError(f"sandbox {self.id} is gone: {self._reason or self._lost or 'its supervisor hung up'}")
