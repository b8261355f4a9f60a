"""The owner's end of a fork server: starts it, sends it requests, hears of ends. Never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer.errors import SandboxStartError
from envs.sandbox import watchdog
from envs.sandbox.limits import ControlGroups
from envs.sandbox.rootfs import Rootfs
from envs.sandbox.state import State, start_time

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0


class ForkServerClient:
    """One running fork server. May be used from one event loop after another, not from two at once."""

    def __init__(
        self, rootfs: Rootfs, state: State, groups: ControlGroups | None, on_ended: Callable[[str | None, str], None]
    ) -> None:
        """Start the process; `ready` waits for it.

        Args:
            rootfs: what sandboxes see.
            state: this backend's folder.
            groups: its control groups, if any.
            on_ended: called with a sandbox's id and the reason when nothing of it is left; None stands for all of
                them, when the fork server itself has ended.

        Raises:
            SandboxStartError: the process cannot be started.
        """
        self._on_ended = on_ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._jobs: dict[int, asyncio.Future[int]] = {}
        self._job_numbers = itertools.count(1)
        """By the layer that is being made or written."""
        self._is_ready, self.failure = False, ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The settings go out in one packet, which the send buffer must hold.
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**21)
        folders = [str(folder) for folder in groups.folders] if groups else []
        settings = {"rootfs": dataclasses.asdict(rootfs), "state": str(state.folder), "control_groups": folders}
        try:
            # -I and -S: nothing of the host's environment, user or site-packages is loaded.
            self._process = subprocess.Popen(
                [
                    getattr(sys, "_base_executable", sys.executable),
                    "-I",
                    "-S",
                    watchdog.__file__,
                    str(os.getpid()),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=(theirs.fileno(), state.lock),
                start_new_session=True,
            )
            self._control.send(json.dumps(settings).encode())
        except OSError as e:
            self._control.close()
            raise SandboxStartError(f"the sandboxes' fork server cannot be started: {e}") from e
        finally:
            theirs.close()
        self._control.setblocking(False)
        pid = self._process.pid
        state.record({"control_groups": folders, "watchdog": pid, "watchdog_start": start_time(pid)})

    def attach(self) -> None:
        """Listen on the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._control.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._loop = loop
        loop.add_reader(self._control, self._on_message)

    async def ready(self) -> None:
        """Wait until sandboxes can be started.

        Raises:
            SandboxStartError: the fork server failed, or was not ready within a minute.
        """
        self.attach()
        if not self._is_ready and not self.failure:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await future
            except TimeoutError as e:
                raise SandboxStartError(f"the sandboxes' fork server was not ready after {_START_TIMEOUT_S:g} s") from e
        if self.failure:
            raise SandboxStartError(self.failure)

    def start(self, request: dict[str, Any], fds: list[int]) -> None:
        """Ask for a sandbox.

        Raises:
            OSError: the fork server has gone, or cannot keep up.
        """
        socket.send_fds(self._control, [json.dumps({"op": "start", **request}).encode()], fds)

    def warm(self, name: str, fds: Sequence[int]) -> None:
        """Ask for a second supervisor of a sandbox (warm.py).

        Args:
            name: of the sandbox.
            fds: its channel, and of control groups what `start` takes.

        Raises:
            OSError: the fork server has gone, or cannot keep up.
        """
        socket.send_fds(self._control, [json.dumps({"op": "warm", "id": name}).encode()], fds)

    def stop(self, name: str) -> None:
        """Ask for a sandbox's end.

        Raises:
            OSError: the fork server has gone, or cannot keep up.
        """
        self._control.send(json.dumps({"op": "stop", "id": name}).encode())

    async def make_layer(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Have a snapshot's layer made, or written to an archive.

        Args:
            request: `op` is `copy` (of the sandbox `id`), `extract` (from the descriptor), both to the layer `snapshot`
                of at most `max_bytes`, or `archive` (of that layer, to the descriptor).
            fds: the descriptor.

        Returns:
            How many bytes the layer takes.

        Raises:
            OSError: it failed, and there is no such layer; `ConnectionError`: with the fork server itself.
        """
        self.attach()
        # By number: two who save snapshots with a layer in common ask for the same one.
        job = next(self._job_numbers)
        future = self._jobs[job] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._control, [json.dumps({**request, "job": job}).encode()], fds)
            return await future
        finally:
            del self._jobs[job]

    def drop(self, snapshot: str) -> None:
        """Let go of a snapshot's memory, as soon as no sandbox has it as a layer. Raises nothing."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"op": "drop", "snapshot": snapshot}).encode())

    def _on_message(self) -> None:
        while True:
            try:
                data = self._control.recv(2**16)
            except BlockingIOError:
                return
            except OSError as e:
                self._fail(str(e))
                return
            if not data:
                self._fail("the sandboxes' fork server ended")
                return
            message = json.loads(data)
            if message.get("event") == "done":
                self._on_done(message)
            elif "event" in message:
                self._on_ended(message["id"], message["reason"])
            elif "error" in message:
                self._fail(f"sandboxes cannot be started: {message['error']}")
            else:
                self._is_ready = True
                self._wake()

    def _on_done(self, message: dict[str, Any]) -> None:
        future = self._jobs.get(message["job"])
        if future is None or future.done():
            return  # whoever wanted it has gone, and has dropped the layer
        if number := message["errno"]:
            future.set_exception(OSError(number, os.strerror(number)))
        else:
            future.set_result(message["bytes"])

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._wake()
        self._on_ended(None, self.failure)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                with contextlib.suppress(RuntimeError):
                    future.set_result(None)
        for future in self._jobs.values():
            if self.failure and not future.done():
                with contextlib.suppress(RuntimeError):
                    future.set_exception(ConnectionError(self.failure))

    def close(self) -> None:
        """End the fork server and with it every sandbox. Blocks for the few milliseconds that this takes."""
        if self._control.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"op": "close"}).encode())
        self._fail("the backend was closed")
        self._control.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self._process.kill()
        self._process.wait()

    @property
    def watchdog(self) -> int:
        """PID of the watchdog, outside all namespaces."""
        return self._process.pid
