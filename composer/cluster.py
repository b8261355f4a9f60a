"""Ray's own processes under a run: one that ends is noticed at once, and ends the run with a sentence of ours.

Ray restarts none of them. Without its control service (`gcs_server`) its library in the driver waits for a minute and
calls `_exit`; without its node manager (`raylet`) actors die one by one, as if they had run out of memory, and pages of
Ray's log are printed. This is the one file that reaches below Ray's public API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from composer.errors import ClusterError

log = logging.getLogger(__name__)
POLL_S = 0.5
TOGETHER_S = 0.2
"""Ray's processes that end so soon after each other are named together."""
SETTLE_S = 2.0
"""How much later than an actor's death that of Ray's own processes may be noticed."""
HANGS_AFTER_S = 15.0
"""When the main thread, which has not answered, is taken to wait for Ray in vain."""
GIVE_UP_AFTER_S = 45.0
"""What an orderly end may take: Ray's library ends the driver a minute after it has lost the control service."""
JOINED_POLL_S = 2.0
SILENT_S = 20.0
"""How long the head of a cluster that was joined may be away: one that keeps its state elsewhere may come back."""
_ROLES = {"gcs_server": "control service", "raylet": "node manager"}


class Watch:
    """Looks after Ray's processes, from a thread: the main one may be in a call of Ray's that does not return."""

    def __init__(self, logs: Path, give_up: Callable[[ClusterError], object]) -> None:
        """Look at nothing yet.

        Args:
            logs: where Ray's logs of what has ended are copied to, since Ray's own folder goes with the run.
            give_up: ends this process, from the watch's thread; called if the main one hangs.
        """
        self.error: ClusterError | None = None
        """Why the run ends, once that is known."""
        self._logs, self._give_up = logs, give_up
        self._on_end: Callable[[ClusterError], object] | None = None
        self._lock = threading.Lock()
        self._ending, self._heard, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._joined: _Joined | None = None
        self._thread = threading.Thread(target=self._loop, name="ray-watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin, before Ray starts."""
        global _watch
        _watch = self
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ray is shut down."""
        global _watch
        _watch = None
        self.expect_end()
        self._ended.set()

    def on_end(self, callback: Callable[[ClusterError], object]) -> None:
        """Have `callback` called from the watch's thread when Ray has ended, or has already; it is to `acknowledge`."""
        with self._lock:
            self._on_end = callback
            if self.error is not None:
                callback(self.error)

    def acknowledge(self) -> None:
        """The main thread has heard of it, and ends the run."""
        self._heard.set()

    def expect_end(self) -> None:
        """Ray is shut down from now on: what ends is meant to."""
        self._ending.set()
        self._heard.set()

    def _loop(self) -> None:
        while not self._ending.wait(POLL_S):
            if self._look():
                time.sleep(TOGETHER_S)
                if parts := self._look():
                    self._say(ClusterError(_sentence(parts)))
                    break
        else:
            return
        assert self.error is not None
        if not (self._heard.wait(HANGS_AFTER_S) and self._ended.wait(GIVE_UP_AFTER_S)):
            self._give_up(self.error)

    def _say(self, error: ClusterError) -> None:
        with self._lock:
            self.error = error
            if self._on_end is not None:
                with contextlib.suppress(RuntimeError):  # the event loop has closed meanwhile
                    self._on_end(error)

    def _look(self) -> dict[str, str]:
        """What has ended -> how."""
        node = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
        if node is None:
            return {}
        own = node.all_processes
        if any(name in own for name in _ROLES):
            codes = {name: info.process.poll() for name in _ROLES for info in own.get(name, ())}
            ended = {name: _how(code) for name, code in codes.items() if code is not None}
            for name in ended:
                self._keep_log(Path(node.get_logs_dir_path()), name)
            return ended
        if self._joined is None:
            self._joined = _Joined(node.raylet_socket_name, node.gcs_address)
        return self._joined.look()

    def _keep_log(self, folder: Path, name: str) -> None:
        for ending in (".out", ".err"):
            with contextlib.suppress(OSError):
                self._logs.mkdir(exist_ok=True)
                shutil.copyfile(folder / f"{name}{ending}", self._logs / f"{name}{ending}")


class _Joined:
    """The processes of a cluster that was there before: no children of ours, so seen from outside."""

    def __init__(self, raylet_socket: str, head: str) -> None:
        self._socket, self._head = raylet_socket, head
        self._had_socket = self._listens()
        self._looked = self._reached = time.monotonic()
        self._ended: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        if time.monotonic() - self._looked >= JOINED_POLL_S:
            self._looked = time.monotonic()
            self._ended = self._look()
        return self._ended

    def _look(self) -> dict[str, str]:
        if self._had_socket and not self._listens():
            return {"raylet": "of this machine"}
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOINED_POLL_S).close()
            self._reached = time.monotonic()
        except OSError as e:
            silent = time.monotonic() - self._reached
            if silent > SILENT_S:
                return {"gcs_server": f"at {self._head}, which has not answered for {silent:.0f} s: {e}"}
        return {}

    def _listens(self) -> bool:
        """Whether the socket is open. Not by a connection: the node manager would take it for a process of Ray's."""
        try:
            lines = Path("/proc/net/unix").read_text().splitlines()
        except OSError:
            return False
        return any(line.endswith(f" {self._socket}") for line in lines)


_watch: Watch | None = None


async def cause_of_death() -> ClusterError | None:
    """Whether an actor died because Ray itself has ended; the watch may take a moment to notice."""
    deadline = time.monotonic() + SETTLE_S
    while (watch := _watch) is not None and watch.error is None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return None if watch is None else watch.error


def keep_rays_messages_off_the_console() -> None:
    """Let what Ray prints in the driver, such as its node manager's log, go to the run's log. After Ray's start."""
    from ray._private import worker

    worker.print_to_stdstream = _to_log


def _to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        log.info("Ray says: %s", line)


def _sentence(parts: Mapping[str, str]) -> str:
    ended = " and its ".join(f"{_ROLES[name]} ({name}, {how})" for name, how in parts.items())
    killed = signal.SIGKILL.name in parts.values()
    remedy = "if nobody killed it, `dmesg` tells whether the kernel did, for want of memory" if killed else ""
    return f"Ray's {ended} ended under the run, which cannot go on without it{remedy and f'; {remedy}'}"


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"
