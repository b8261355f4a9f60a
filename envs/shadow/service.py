"""Starts and stops the shadow backend that ships with the product: one process, which ends with whoever started it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from composer.errors import ToolError
from envs.shadow.python_pages import CORPUS
from envs.shadow.server import TOKEN_ENV
from envs.waiting import ready

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
"""For the process to read its pages and to listen."""
_END_S = 5.0


class ShadowBackend:
    """The service as a process of its own on a free port of 127.0.0.1, with a token that only its owner knows.

    It ends by `stop`, and when its standard input does, which is this process's: also when this one is killed.

    Example:
        >>> backend = ShadowBackend()
        >>> backend.start()
        >>> url, token = backend.url, backend.token
        >>> backend.stop()
    """

    def __init__(self, corpus: str = "", start_timeout_s: float = _START_S) -> None:
        """Nothing starts yet.

        Args:
            corpus: folder of pages for /web (pages.py), or `envs.shadow.python_pages.CORPUS`; "": there are none.
            start_timeout_s: for it to read the pages and to listen.

        Raises:
            ValueError: the corpus is no folder.
        """
        if corpus not in ("", CORPUS) and not Path(corpus).is_dir():
            raise ValueError(f"`corpus` must be a folder of pages, but is {corpus!r} instead")
        self.corpus, self.start_timeout_s = corpus, start_timeout_s
        self.url = self.token = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, unless it runs; blocks until it listens.

        Raises:
            ToolError: it could not be started.
        """
        if self.is_running:
            return
        self.stop()
        self.token = secrets.token_hex(16)
        command = [sys.executable, "-m", "envs.shadow.server", "--owned"]
        if self.corpus:
            command += ["--corpus", self.corpus if self.corpus == CORPUS else str(Path(self.corpus).resolve())]
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        with tempfile.TemporaryFile() as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | {TOKEN_ENV: self.token, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is for the owner
                )
                assert self._process.stdout is not None
                line = _read_line(self._process.stdout, self.start_timeout_s)
                self.url = f"http://127.0.0.1:{int(json.loads(line)['port'])}"
            except (OSError, ValueError, TypeError, KeyError) as error:
                self.stop()
                errors.seek(0)
                said = errors.read(2000).decode(errors="replace").strip() or str(error)
                raise ToolError(f"the shadow backend could not be started: {said}") from error

    def stop(self) -> None:
        """End it. Idempotent; raises nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """One line of a pipe that nothing was read from.

    Raises:
        OSError: it did not come in time, or the other side hung up.
    """
    deadline, data = time.monotonic() + timeout_s, b""
    while not data.endswith(b"\n"):
        if not ready(stream.fileno(), timeout_s=deadline - time.monotonic()):
            raise TimeoutError(f"it does not listen after {timeout_s:g} s")
        chunk = os.read(stream.fileno(), 4096)
        if not chunk:
            raise ConnectionError("it ended at once")
        data += chunk
    return data


_shared: dict[str, ShadowBackend] = {}
_lock = threading.Lock()


def shared(corpus: str = "") -> ShadowBackend:
    """This process's own backend for a corpus, running: started by the first call, and again after it ended.

    Raises:
        ToolError: it could not be started.
        ValueError: as of `ShadowBackend`.
    """
    with _lock:
        if corpus not in _shared:
            _shared[corpus] = ShadowBackend(corpus)
        _shared[corpus].start()
        return _shared[corpus]


@atexit.register
def stop_shared() -> None:
    """End the backends of `shared`, as the end of this process does. Idempotent; raises nothing."""
    with _lock:
        while _shared:
            _shared.popitem()[1].stop()
