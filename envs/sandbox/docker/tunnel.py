"""Ways to an engine that no plain socket leads to: a private Unix socket of ours, and behind it TLS or SSH.

Everything else (the SDK, and the streams that the event loop serves itself) then has a plain socket in either case. The
socket lies in a folder of this user's alone; what a killed process leaves of it, a sweep removes (state.py).

    tcp:// with TLS     as Docker's own clients: DOCKER_TLS_VERIFY, and DOCKER_CERT_PATH with ca.pem, cert.pem, key.pem
    ssh://              the ssh program, with the user's own configuration and keys, and without asking anything
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from envs.sandbox.state import State, start_time

TLS_VARIABLES = ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
_ENGINES_SOCKET = "/var/run/docker.sock"
_TLS_PORT = 2376
_CHUNK = 2**16
_PATIENCE_S = 20.0
_SOCKET = "engine.sock"


class TunnelError(OSError):
    """There is no way to an engine; its text says why in full."""


class Tunnel(Protocol):
    """Leads to an engine for as long as it is open."""

    address: str
    """unix://, of a socket that only this user can get at."""

    def is_open(self) -> bool:
        """Whether it still leads there."""
        ...

    def close(self) -> None:
        """End it. Idempotent; raises nothing."""
        ...


def open_tunnel(address: str) -> Tunnel | None:
    """A way to an engine; None if its address can be used as it is. Blocks.

    Raises:
        TunnelError: there is none, and why.
    """
    if address.startswith("ssh://"):
        return SshTunnel(address)
    uses_tls = any(os.environ.get(name) for name in TLS_VARIABLES)
    if address.startswith("https://") or (address.startswith("tcp://") and uses_tls):
        return TlsTunnel(address)
    return None


def tls_context() -> ssl.SSLContext:
    """What Docker's variables say of certificates: this client's, and who vouches for the engine.

    Without DOCKER_TLS_VERIFY the engine may be anybody, as with Docker's own clients.

    Raises:
        TunnelError: a file is missing, or is no certificate.
    """
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker").expanduser()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if os.environ.get("DOCKER_TLS_VERIFY"):
        _load(folder / "ca.pem", lambda: context.load_verify_locations(folder / "ca.pem"))
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _load(folder / "cert.pem", lambda: context.load_cert_chain(folder / "cert.pem", folder / "key.pem"))
    return context


def _load(file: Path, load: Any) -> None:
    try:
        load()
    except FileNotFoundError:
        raise TunnelError(f"there is no {file} (with its key): let DOCKER_CERT_PATH name the folder") from None
    except (ssl.SSLError, PermissionError) as e:
        raise TunnelError(f"{file} cannot be read as a certificate: {e}") from e


class TlsTunnel:
    """Speaks TLS with the engine, in a thread with an event loop of its own."""

    def __init__(self, address: str) -> None:
        """Open it; the engine is first asked when somebody connects.

        Raises:
            TunnelError: the certificates are none.
        OSError: there is no place for the socket.
        """
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "localhost", parts.port or _TLS_PORT
        self._context = tls_context()
        self._state: State | None = State.create("docker-tls")
        self._state.record({"control_groups": []})
        path = self._state.folder / _SOCKET
        self.address = f"unix://{path}"
        self.failure = ""
        """Why the last connection could not be made."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="docker-tls", daemon=True)
        self._thread.start()
        try:
            self._server = self._do(asyncio.start_unix_server(self._serve, path))
        except BaseException:
            self.close()
            raise

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def is_open(self) -> bool:
        """Whether it still leads there."""
        return self._state is not None

    def close(self) -> None:
        """End it. Idempotent; raises nothing."""
        state, self._state = self._state, None
        if state is None:
            return
        with contextlib.suppress(TimeoutError):
            self._do(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._loop.close()
        state.remove()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                session = _Session(self._context, self._host, *await asyncio.open_connection(self._host, self._port))
                await session.shake_hands()
            self.failure = ""
        except OSError as e:
            self.failure = str(e) or type(e).__name__
            writer.close()
            return
        tasks = [asyncio.ensure_future(work) for work in (_to(session, reader), _from(session, writer))]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            pass  # the tunnel is closed, and asyncio's server takes no task of its own for cancelled
        finally:
            for task in tasks:
                task.cancel()
            session.close()
            writer.close()


async def _to(session: _Session, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            await session.write(data)
        await session.write_end()


async def _from(session: _Session, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await session.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    # The other direction may wait for somebody who has hung up.
    writer.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Session:
    """TLS of which one direction can end before the other, as an engine's streams do; asyncio's own knows no such."""

    def __init__(
        self, context: ssl.SSLContext, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_hostname=host)
        self._read_early = b""

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                await self._flush()  # the engine hears why
                raise
        await self._flush()

    async def read(self) -> bytes:
        """Some bytes; none at the end."""
        while True:
            data, self._read_early = self._read_early, b""
            if data:
                return data
            try:
                return self._tls.read(_CHUNK)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def write(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def write_end(self) -> None:
        """Say that no more is written. What the engine still says can be read on."""
        with contextlib.suppress(ssl.SSLError):
            # What has arrived must not lie in the way: OpenSSL would take it for an answer to this.
            while data := self._tls.read(_CHUNK):
                self._read_early += data
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        await self._flush()

    async def _flush(self) -> None:
        if data := self._leaving.read():
            self._writer.write(data)
            await self._writer.drain()

    async def _fill(self) -> None:
        if data := await self._reader.read(_CHUNK):
            self._arrived.write(data)
        else:
            self._arrived.write_eof()

    def close(self) -> None:
        self._writer.close()


class SshTunnel:
    """The ssh program with a forwarded socket. It ends with its standard input, and so with this process."""

    def __init__(self, address: str) -> None:
        """Open it, and wait until it leads there.

        Raises:
            TunnelError: there is no ssh, or it could not connect; its own words are in it.
        """
        parts = urlsplit(address)
        ssh = shutil.which("ssh")
        if ssh is None:
            raise TunnelError("there is no ssh program on this machine: install OpenSSH's client")
        if not parts.hostname or parts.password:
            raise TunnelError(f"{address!r} must be ssh://[user@]machine[:port][/path of the socket]")
        self._state: State | None = State.create("docker-ssh")
        path = self._state.folder / _SOCKET
        self.address = f"unix://{path}"
        target = f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname
        options = ("BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4")
        command = [ssh, *(word for option in options for word in ("-o", option)), "-T"]
        command += ["-p", str(parts.port)] if parts.port else []
        command += ["-L", f"{path}:{parts.path if parts.path not in ('', '/') else _ENGINES_SOCKET}"]
        # `cat` ends when its input does, and ssh with it.
        with (self._state.folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, "--", target, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            )
        pid = self._process.pid
        self._state.record({"control_groups": [], "watchdog": pid, "watchdog_start": start_time(pid)})
        deadline = time.monotonic() + _PATIENCE_S
        while not path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = (self._state.folder / "errors").read_text(errors="replace").split("\n")
                said = next((line.strip() for line in reversed(words) if line.strip()), "it said nothing")
                self.close()
                raise TunnelError(f"ssh could not forward the engine's socket of {target}: {said[:200]}")
            time.sleep(0.02)

    def is_open(self) -> bool:
        """Whether it still leads there."""
        return self._state is not None and self._process.poll() is None

    def close(self) -> None:
        """End it. Idempotent; raises nothing."""
        state, self._state = self._state, None
        if state is None:
            return
        self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        state.remove()
