"""The connection to a Docker engine. The SDK blocks: its calls run in a bounded pool of threads, each with a deadline.

Streams are different: once an exec has begun, its connection is a plain socket that the event loop serves itself, so
a command that takes long holds no thread. That is why the engine has to be reached by a plain socket: one behind TLS
or SSH is, through a socket of ours (tunnel.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import urllib3

from composer.errors import SandboxError
from envs.sandbox.docker import tunnel
from envs.sandbox.docker.stream import ExecStream

T = TypeVar("T")

_SCHEMES = ("unix://", "tcp://", "http://", "https://", "ssh://")
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
LEAST_API = (1, 41)
"""Docker 20.10, the first with private control-group namespaces."""
_THREADS = 16
_HTTP_S = 60
"""The longest silence within one call; a thread that waits for a hung engine is free again after that."""
_IMAGE_S = 1800
"""The same for pulling, building and importing images."""


class EngineRefusal(SandboxError):
    """The engine answered, and what it said was no."""

    status = 0
    """HTTP status: 404 there is no such thing, 409 its state forbids it."""
    said = ""


@dataclass(frozen=True)
class ProgramState:
    """What the engine knows of a program."""

    is_running: bool
    exit_code: int | None
    has_no_number: bool
    """It has not started; if it does not run either, it never did, and its output is what the engine says of it."""


class Engine:
    """One Docker engine. Nothing is sent before the first call.

    Example:
        >>> async def example() -> str:
        ...     engine = Engine("unix:///run/docker.sock")
        ...     try:
        ...         return (await engine.call("say its version", lambda client: client.version()))["Version"]
        ...     finally:
        ...         engine.close()
    """

    def __init__(self, host: str | None = None, answer_s: float = 30.0) -> None:
        """Choose the engine.

        Args:
            host: its address (unix://, tcp://, ssh://); None: `DOCKER_HOST`, or the default socket. DOCKER_TLS_VERIFY
                and DOCKER_CERT_PATH say of tcp:// what they say to Docker's own clients.
            answer_s: seconds in which it has to answer a call.
        """
        self.address = host or os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS
        self.answer_s = answer_s
        self._tunnel: tunnel.Tunnel | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._clients: dict[int, docker.APIClient] = {}
        self._lock = threading.Lock()

    async def call(
        self,
        what: str,
        function: Callable[[docker.APIClient], T],
        timeout_s: float | None = None,
        for_images: bool = False,
    ) -> T:
        """Run `function` with the SDK's client in a thread.

        Args:
            what: for the error: the engine did not, or could not, `what`.
            function: makes the call; runs to its end even where nobody waits for it any more.
            timeout_s: seconds to wait; None: those in which the engine has to answer.
            for_images: whether it may be silent for long.

        Raises:
            EngineRefusal: the engine said no.
            SandboxError: it cannot be reached, or did not answer in time.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        limit = self.answer_s if timeout_s is None else timeout_s
        future = asyncio.get_running_loop().run_in_executor(self._pool, self.call_now, what, function, for_images)
        done, _ = await asyncio.wait([future], timeout=limit)
        if not done:
            future.add_done_callback(_forget)
            raise SandboxError(f"the Docker engine at {self.address} did not {what} within {limit:g} s")
        return future.result()

    def call_now(self, what: str, function: Callable[[docker.APIClient], T], for_images: bool = False) -> T:
        """The same in this thread.

        Raises:
            EngineRefusal: the engine said no.
            SandboxError: it cannot be reached, or was silent for too long.
        """
        try:
            return function(self._client(_IMAGE_S if for_images else _HTTP_S))
        except docker.errors.APIError as e:
            said = " ".join(str(e.explanation or e).split())
            error = EngineRefusal(f"the Docker engine at {self.address} could not {what}: {said[:500]}")
            error.status, error.said = e.status_code or 0, said
            raise error from e
        except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as e:
            is_way = isinstance(e, tunnel.TunnelError)
            why = str(e) if is_way else getattr(self._tunnel, "failure", "") or _reason(e)
            raise SandboxError(f"the Docker engine at {self.address} did not {what}: {why}") from e

    def _client(self, silence_s: int) -> docker.APIClient:
        if not self.address.startswith(_SCHEMES):
            raise docker.errors.DockerException(f"its address must begin with one of {', '.join(_SCHEMES)}")
        with self._lock:
            if self._tunnel is not None and not self._tunnel.is_open():
                self._tunnel.close()
                self._tunnel = None
                self._clients.clear()
            if silence_s not in self._clients:
                self._tunnel = self._tunnel or tunnel.open_tunnel(self.address)
                address = self._tunnel.address if self._tunnel is not None else self.address
                client = docker.APIClient(address, version="auto", timeout=silence_s, max_pool_size=_THREADS)
                # No proxy of the environment stands between here and an engine.
                client.trust_env = False
                self._clients[silence_s] = client
            return self._clients[silence_s]

    async def open(
        self,
        container: str,
        argv: Sequence[str],
        *,
        user: str,
        stdin: bool = True,
        environment: Mapping[str, str] | None = None,
        workdir: str = "/",
    ) -> ExecStream:
        """Start a program in a container and take over its streams.

        Raises:
            EngineRefusal: the engine said no.
            SandboxError: it cannot be reached, or did not answer in time.
        """

        def start(client: docker.APIClient) -> ExecStream:
            made = client.exec_create(
                container,
                list(argv),
                stdin=stdin,
                user=user,
                environment=[f"{name}={value}" for name, value in (environment or {}).items()],
                workdir=workdir,
            )
            return _take_over(made["Id"], client.exec_start(made["Id"], socket=True))

        return await self._opened(self.call(f"start {argv[0]!r} in container {container}", start))

    async def run_attached(self, what: str, make: Callable[[docker.APIClient], str]) -> ExecStream:
        """Make a container, start it, and take over the streams of its first process.

        Args:
            what: for the error.
            make: makes it, with an open standard input; returns its id.

        Raises:
            EngineRefusal: the engine said no.
            SandboxError: it cannot be reached, or did not answer in time.
        """

        def start(client: docker.APIClient) -> ExecStream:
            container = make(client)
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            stream = _take_over("", client.attach_socket(container, params=streams))
            try:
                client.start(container)
            except BaseException:
                stream.close()
                raise
            return stream

        return await self._opened(self.call(what, start))

    async def _opened(self, call: Coroutine[Any, Any, ExecStream]) -> ExecStream:
        """A stream that is closed if nobody waits for it any more when it is there."""
        opening = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: _forget(done) or done.cancelled() or _close_result(done))
            raise

    async def state_of(self, stream: ExecStream) -> ProgramState:
        """How it stands with the program of a stream.

        Raises:
            EngineRefusal: there is no such program any more, nor its container.
            SandboxError: the engine cannot be reached, or did not answer in time.
        """
        state = await self.call("look at a program", lambda client: client.exec_inspect(stream.id))
        return ProgramState(bool(state["Running"]), state["ExitCode"], not state["Pid"])

    def close(self) -> None:
        """Let go of connections and threads. May be used again afterwards."""
        with self._lock:
            clients, self._clients = self._clients, {}
            way, self._tunnel = self._tunnel, None
        for client in clients.values():
            client.close()
        if way is not None:
            way.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def _take_over(id: str, raw: Any) -> ExecStream:
    """The socket of a started exec, apart from the HTTP client that made it, and what that has read of it already."""
    connection = raw._sock
    connection.setblocking(False)
    response = getattr(raw, "_response", None)
    buffered = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
    early = b""
    if buffered is not None:
        # The buffer of the response's head: without blocking, `peek` gives what is in it and reads no more than fits.
        with contextlib.suppress(OSError, ValueError):
            early = bytes(buffered.peek())
    own = socket.socket(fileno=os.dup(connection.fileno()))
    own.setblocking(False)
    if response is not None:
        response.close()
    return ExecStream(id, own, early)


def _forget(future: asyncio.Future[Any]) -> None:
    """Look at the outcome of what nobody waits for, or asyncio would complain about it."""
    if not future.cancelled():
        future.exception()


def _close_result(future: asyncio.Future[ExecStream]) -> None:
    if future.exception() is None:
        future.result().close()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "Permission denied" in text:
        return "no permission for its socket: add this user to the group docker and log in again"
    if "No such file" in text or "Connection refused" in text:
        return "no engine runs there: start it, or name another by host or DOCKER_HOST"
    return text[:300]
