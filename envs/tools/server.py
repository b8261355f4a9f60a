"""Tool servers: programs inside the sandbox that a tool asks by JSON-RPC, one of each kind for every episode.

A server is started before the agent begins, or by the first call that needs it, and ends with the sandbox. A sandbox
runs one command at a time, and closes a command's channel when the command ends. So the server itself is left behind,
between two named pipes, by a launcher that ends at once; and every call is a command of its own, whose channel a relay
joins to the two pipes:

    call <-- channel --> relay <-- in, out --> server

Who is to blame. A server runs as the sandbox's user, beside whatever the agent runs. The agent can end it, stop it,
replace its files or its pipes, fill its disk, or have a program of its own speak in its place. So whatever comes over
the channel, late, broken or not at all, can be the agent's doing, and is a result that the model sees (`PeerError`
here); an error of the machine in its place would let the agent void a reward that it does not like. The time that a
call takes is a command's, and so the agent's too. Two things cannot be its doing, and are errors:

- The sandbox fails: a `SandboxError`.
- The server does not start in a sandbox in which no model has done anything yet: `check`, which is called in a fresh
  sandbox before a run and in each episode's before its agent, raises a `ToolError`. Without it, a wrong command line in
  the config, or a machine that is too slow just then, would look like a server that the agent breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from composer.contract import ExecResult, Sandbox
from composer.errors import ToolError
from envs.tools.base import require_positive
from envs.tools.episode import EpisodeState
from envs.tools.rpc import PeerError, PeerTimeout, RpcConnection

T = TypeVar("T")
_LAUNCH_S = 10.0
_GRACE_S = 2.0
"""For a relay to end, after that it is killed."""
_MAX_LATE = 2
"""Answers in a row that do not come in time, after which a server is started anew."""
_LOG_BYTES = 2**16
_MAX_QUOTED = 500
_GONE = 3
# The server opens both pipes to read and to write, and so waits for nobody, and never sees an end of them.
_LAUNCH = """
pipes=$1 earlier=$2 log=$3; shift 3
[ -s "$earlier/pid" ] && kill -KILL "$(cat "$earlier/pid")" 2>/dev/null
command -v "$1" >/dev/null 2>&1 || { echo "$1: not found"; exit 127; }
rm -rf "$pipes" && mkdir "$pipes" && mkfifo "$pipes/in" "$pipes/out" || exit 1
(
    "$@" 0<>"$pipes/in" 1<>"$pipes/out" 2>"$log" &
    echo $! >"$pipes/pid"
    wait
    rm -rf "$pipes"
) </dev/null >/dev/null 2>&1 &
while [ -d "$pipes" ] && ! [ -s "$pipes/pid" ]; do sleep 0.01; done
"""
# What reads is the command itself, since it must not outlive it: it would take the answer to the next call.
_RELAY = f"""
cd "$1" && read -r server <pid && kill -0 "$server" && [ -p in ] && [ -p out ] || exit {_GONE}
exec 3<&0
(cat <&3 >in; kill $$) </dev/null >/dev/null 2>&1 &
exec cat <out 3<&-
"""


@dataclass
class _Running:
    """The server of one episode."""

    num_starts: int = 0
    num_requests: int = 0
    num_late: int = 0
    """How many answers in a row did not come in time."""
    is_there: bool = False


class SandboxServer:
    """Starts one program a sandbox, and asks it. A subclass may greet it first, by `greet`.

    It starts in the working directory. Its standard error goes to a file in the sandbox, /tmp/<name>.log, whose end is
    quoted when it does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "server",
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 30.0,
        timeout_s: float = 60.0,
        max_message_bytes: int = 2**20,
    ) -> None:
        """Choose the program; nothing starts yet.

        Args:
            command: the program and its arguments, as the sandbox knows them.
            name: of the server, in messages and in the names of files.
            env: variables on top of the sandbox's own.
            start_timeout_s: wall time of the greeting.
            timeout_s: wall time of one request.
            max_message_bytes: a server that says more at a time is cut off.

        Raises:
            ValueError: there is no command, or a value is too small.
        """
        if not command or not all(isinstance(word, str) and word and "\0" not in word for word in command):
            raise ValueError(f"`command` must be a program and its arguments, but is {command!r} instead")
        require_positive(start_timeout_s=start_timeout_s, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        self.command, self.name, self.env = tuple(command), name, dict(env or {})
        self.start_timeout_s, self.timeout_s, self.max_message_bytes = start_timeout_s, timeout_s, max_message_bytes
        self._servers: EpisodeState[_Running] = EpisodeState(_Running)

    async def request(
        self, sandbox: Sandbox, method: str, params: Mapping[str, Any], timeout_s: float | None = None
    ) -> Any:
        """The result of a call. A server that has ended, or does not answer any more, is started anew by the next one.

        Args:
            sandbox: where the server is.
            method: its name.
            params: by name.
            timeout_s: wall time; None: the server's.

        Raises:
            RpcError: the server answered with an error.
            PeerError: there is no answer.
            SandboxError: the sandbox failed.
        """
        running = self._servers.of(sandbox)
        if not running.is_there:
            await self._start(sandbox, running)
        deadline_s = self.timeout_s if timeout_s is None else timeout_s

        async def ask(connection: RpcConnection) -> Any:
            try:
                return await connection.request(method, params, deadline_s)
            except PeerTimeout as error:
                with contextlib.suppress(PeerError):
                    await self.give_up(connection, error.number)
                raise

        return await self._talk(sandbox, running, ask, deadline_s)

    async def check(self, sandbox: Sandbox) -> None:
        """Make sure that the server starts in a sandbox in which no model has done anything.

        Raises:
            ToolError: it does not.
            SandboxError: the sandbox failed.
        """
        running = self._servers.of(sandbox)
        try:
            if not running.is_there:
                await self._start(sandbox, running)
        except PeerError as error:
            raise ToolError(f"{self.name}: {error}: mend its command, {' '.join(self.command)!r}") from error

    async def greet(self, connection: RpcConnection) -> None:
        """Say what has to be said first, within `start_timeout_s`.

        Raises:
            PeerError: the server does not answer as it should.
        """

    async def give_up(self, connection: RpcConnection, number: int) -> None:
        """Tell the server that the answer to a request is not waited for any more.

        Raises:
            PeerError: it does not listen.
        """

    async def _start(self, sandbox: Sandbox, running: _Running) -> None:
        running.num_starts += 1
        earlier = self._pipes(running.num_starts - 1)
        argv = ["sh", "-c", _LAUNCH, "sh", self._pipes(running.num_starts), earlier, self._log, *self.command]
        result = await sandbox.exec(argv, env=self.env, timeout_s=_LAUNCH_S)
        if result.exit_code != 0:
            said = result.output.decode(errors="replace").strip()
            raise PeerError(f"it could not be started: {said[-_MAX_QUOTED:] or f'exit code {result.exit_code}'}")

        async def greet(connection: RpcConnection) -> None:
            try:
                async with asyncio.timeout(self.start_timeout_s):
                    await self.greet(connection)
            except TimeoutError:
                raise PeerError(f"it did not answer within {self.start_timeout_s:g} s") from None

        try:
            await self._talk(sandbox, running, greet, self.start_timeout_s)
        except PeerError as error:
            try:
                said = (await sandbox.read(self._log, _LOG_BYTES)).decode(errors="replace").strip()
            except OSError:
                said = ""
            words = f"; it said: {said[-_MAX_QUOTED:]}" if said else ""
            raise PeerError(f"it did not start: {error}{words}") from error
        running.is_there = True

    async def _talk(
        self, sandbox: Sandbox, running: _Running, talk: Callable[[RpcConnection], Awaitable[T]], timeout_s: float
    ) -> T:
        """Have one conversation with a server that was started."""
        ours, theirs = socket.socketpair()
        connection = RpcConnection(ours, self.max_message_bytes, running.num_requests)
        argv = ["sh", "-c", _RELAY, "sh", self._pipes(running.num_starts)]
        relay = asyncio.ensure_future(sandbox.exec(argv, timeout_s=timeout_s + _GRACE_S, channel=theirs))
        relay.add_done_callback(lambda _: connection.hang_up())
        try:
            answer = await talk(connection)
            running.num_late = 0
            return answer
        except PeerError as error:
            running.num_late = running.num_late + 1 if isinstance(error, PeerTimeout) else 0
            if connection.trouble or running.num_late == _MAX_LATE:
                running.is_there = False
            raise
        finally:
            running.num_requests = connection.num_requests
            connection.hang_up()
            await self._end(relay, running)
            connection.close()

    @staticmethod
    async def _end(relay: asyncio.Future[ExecResult], running: _Running) -> None:
        """Wait for the end of a relay, which has been told.

        Raises:
            SandboxError: the sandbox failed, which counts for more than what was said.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            relay.cancel()
        try:
            await asyncio.wait([relay])
        except asyncio.CancelledError:
            relay.cancel()
            raise
        if relay.cancelled():
            return
        result = relay.result()
        if result.timed_out:  # nobody was at the other end of the pipes
            running.is_there = False

    @property
    def _log(self) -> str:
        return f"/tmp/{self.name}.log"

    def _pipes(self, number: int) -> str:
        return f"/tmp/{self.name}.{number}"
