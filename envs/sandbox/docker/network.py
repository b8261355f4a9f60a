"""The network of a container that has none: everything in it leads to a relay, and from there to the egress proxy.

    sandbox's container     network "none", no capability, nothing of this in it
    relay's container       in the network of the first (and in nothing else of it), made anew for each sandbox; it
                            makes every address lead to itself, and then gives up all rights (envs/egress/relay.py)
      `- its streams, over the engine's API, so from any engine, near or far
           `- this process: passes them on as they come
                `- the proxy (envs/egress/carried.py)

The relay's container ends with its standard input, and so with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import posixpath
import socket
import tarfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import docker.errors

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.egress import trust
from envs.egress.relay import READY
from envs.sandbox.docker import owner, prepared, relay_image
from envs.sandbox.docker.container import CERTIFICATES
from envs.sandbox.docker.engine import Engine
from envs.sandbox.docker.stream import STDERR, ExecStream

if TYPE_CHECKING:
    from envs.egress.client import Proxy

_CHUNK = 2**16
_WORDS = 300
_QUIET_S = 3600.0
_RELAY_BYTES = 128 * 2**20
_MOST_CERTIFICATES = 2**21


class Network:
    """The way of one sandbox to the proxy."""

    def __init__(self, engine: Engine, proxy: Proxy, name: str, container: str, on_lost: Callable[[str], None]) -> None:
        """Nothing has started.

        Args:
            engine: runs the containers.
            proxy: what serves the sandbox.
            name: by which the proxy knows it.
            container: the sandbox's.
            on_lost: called with the reason when the relay has ended by itself.
        """
        self._engine, self._proxy, self._name, self._container, self._on_lost = engine, proxy, name, container, on_lost
        self._relay = f"{container}-net"
        self._stream: ExecStream | None = None
        self._channel: socket.socket | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._was_made = self._is_closed = False

    async def begin(self, image: str, limits: SandboxLimits, labels: dict[str, str]) -> None:
        """Start the relay, when the sandbox's container runs and nobody works in it yet.

        Args:
            image: of the relay.
            limits: of the sandbox.
            labels: of the container.

        Raises:
            SandboxStartError: it does not start, or may not change the network.
            SandboxError: the engine does not answer.
        """
        num_connections = self._proxy.policy.connections
        command = [*relay_image.PROGRAM[1:], str(num_connections), str(math.ceil(limits.lifetime_s) + 5)]

        def make(client: docker.APIClient) -> str:
            return client.create_container(
                image,
                entrypoint=relay_image.PROGRAM[:1],
                command=command,
                name=self._relay,
                user="0:0",
                stdin_open=True,
                labels=labels,
                use_config_proxy=False,
                host_config=client.create_host_config(
                    network_mode=f"container:{self._container}",
                    read_only=True,
                    auto_remove=True,
                    cap_drop=["ALL"],
                    cap_add=["NET_ADMIN", "NET_BIND_SERVICE", "SETUID", "SETGID"],
                    security_opt=["no-new-privileges:true"],
                    mem_limit=_RELAY_BYTES,
                    pids_limit=16,
                    log_config={"Type": "none"},
                ),
            )["Id"]

        self._was_made = True
        self._stream = await self._engine.run_attached("start a sandbox's network relay", make)
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        ready = asyncio.get_running_loop().create_future()
        try:
            self._proxy.carry(self._name, limits, theirs)
            self._pumping = asyncio.create_task(self._pump(self._stream, self._channel, ready))
            async with asyncio.timeout(self._engine.answer_s):
                said = await ready
        except TimeoutError:
            raise SandboxStartError(f"a sandbox's network was not ready after {self._engine.answer_s:g} s") from None
        except OSError as e:
            raise SandboxStartError(f"a sandbox has no way to the egress proxy: {e}") from e
        finally:
            theirs.close()
        if said:
            raise SandboxStartError(f"a sandbox's network cannot be set up: {said}")

    async def close(self) -> None:
        """End it, and leave nothing on the engine.

        Raises:
            SandboxError: the engine does not answer.
        """
        self._is_closed = True
        self._proxy.detach(self._name)
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.wait([self._pumping])
        if self._stream is not None:
            self._stream.close()
        if self._channel is not None:
            self._channel.close()
        if self._was_made:
            await self._engine.call("remove a network relay", lambda client: owner.remove(client, self._relay))

    async def _pump(self, stream: ExecStream, channel: socket.socket, ready: asyncio.Future[str]) -> None:
        outward = asyncio.create_task(self._outward(stream, channel))
        words = ""
        loop = asyncio.get_running_loop()
        try:
            while not stream.ended:
                piece = await stream.receive(_QUIET_S)
                if piece is None:
                    continue
                kind, data = piece
                if kind != STDERR:
                    await loop.sock_sendall(channel, data)
                elif data == READY and not ready.done():
                    ready.set_result("")
                else:
                    words = (words + data.decode(errors="replace"))[-_WORDS:]
        except OSError:
            words = words or "the egress proxy hung up"
        finally:
            outward.cancel()
        words = " ".join(words.split()) or "its relay ended"
        if not ready.done():
            ready.set_result(words)
        elif not self._is_closed:
            self._on_lost(f"its network is gone: {words}")

    async def _outward(self, stream: ExecStream, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(channel, _CHUNK):
                await stream.send(data)
        stream.end_input()


@dataclass(frozen=True)
class Online:
    """What a sandbox with a network takes."""

    network: Network
    image: str
    """Of the relay."""
    certificates: bytes
    """An archive of those that it is to trust."""
    variables: dict[str, str]
    """That say where they are."""


def certificates(client: docker.APIClient, image: str, root: tuple[str, str]) -> bytes:
    """An archive of an image's folder of certificates with one more, whose paths are relative to the root directory.

    What is in an image is of others: it is copied without being unpacked here.

    Args:
        client: the SDK's.
        image: a prepared one.
        root: the certificate (PEM) and OpenSSL's hash of its subject.

    Raises:
        SandboxError: the image has more of them than any has.
        APIError: as the SDK raises it.
    """
    certificate, subject_hash = root
    own = {Path(trust.BUNDLE).name: b"", f"{subject_hash}.0": certificate.encode()}
    labels = owner.labels("certificates", "") | {owner.KIND: owner.SANDBOX}
    name = f"{prepared.NAME}-{uuid.uuid4().hex[:12]}"
    container = client.create_container(
        image, command=["-"], labels=labels, name=name, host_config=client.create_host_config(network_mode="none")
    )["Id"]
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for info, content in _entries(client, container, f"{CERTIFICATES}/."):
                inside = posixpath.normpath(info.name.partition("/")[2])
                if inside == Path(trust.BUNDLE).name:
                    target = posixpath.join(CERTIFICATES, info.linkname)
                    parts = [text for _, text in _entries(client, container, target)] if info.issym() else [content]
                    own[inside] = b"".join(parts)
                elif inside not in own and not inside.startswith(".") and (info.isreg() or info.issym()):
                    _add(tar, inside, content, info.linkname if info.issym() else "")
            bundle = own[Path(trust.BUNDLE).name]
            own[Path(trust.BUNDLE).name] = bundle + (b"\n" if bundle else b"") + certificate.encode()
            for inside, content in own.items():
                _add(tar, inside, content)
    finally:
        owner.remove(client, container)
    return buffer.getvalue()


def _entries(client: docker.APIClient, container: str, path: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    """What an archive of a path holds; nothing if there is no such path."""
    file = io.BytesIO()
    try:
        chunks, _ = client.get_archive(container, path)
    except docker.errors.APIError as e:
        if e.status_code == 404:
            return []
        raise
    for chunk in chunks:
        file.write(chunk)
        if file.tell() > _MOST_CERTIFICATES:
            raise SandboxError(f"the image has more than {_MOST_CERTIFICATES} bytes in {path}")
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r") as tar:
        return [(info, part.read() if info.isreg() and (part := tar.extractfile(info)) else b"") for info in tar]


def _add(tar: tarfile.TarFile, inside: str, content: bytes, link: str = "") -> None:
    info = tarfile.TarInfo(posixpath.join(CERTIFICATES, inside).strip("/"))
    info.size, info.mode = len(content), 0o644
    if link:
        info.type, info.linkname = tarfile.SYMTYPE, link
    tar.addfile(info, io.BytesIO(content))
