"""A backend with images for tests of the grader alone: temporary folders and real programs, no isolation at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from composer.contract import ExecResult, SandboxLimits


class FolderSandbox:
    """`<folder>/work` is the working directory; absolute paths are below `<folder>`, also in commands' `$ROOT`."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.work = self.root / "work"
        self.workdir = str(self.work)
        self.written: list[str] = []
        for path, content in files.items():
            self._put(path, content)

    def _place(self, path: str) -> Path:
        return self.root / path[1:] if path.startswith("/") else self.work / path

    def _put(self, path: str, content: bytes) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    async def write(self, path: str, content: bytes) -> None:
        self.written.append(path)
        if path.startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        self._put(path, content)

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        return self._place(path).read_bytes()[:max_bytes]

    async def files(self, max_bytes: int = 2**20) -> dict[str, bytes]:
        found = {str(p.relative_to(self.work)): p.read_bytes() for p in self.work.rglob("*") if p.is_file()}
        if sum(map(len, found.values())) > max_bytes:
            raise OSError(errno.EFBIG, "File too large")
        return found

    async def exec(self, argv, *, stdin=b"", env=None, timeout_s=None) -> ExecResult:
        start = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.work,
            env={**os.environ, "ROOT": str(self.root)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(stdin), timeout_s)
            return ExecResult(process.returncode, output, seconds=time.monotonic() - start)
        except TimeoutError:
            return ExecResult(-9, b"", timed_out=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def stop(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class ImageBackend:
    """Images are files by name; keeps its sandboxes for a look afterwards."""

    def __init__(self, images: Mapping[str, Mapping[str, bytes]]) -> None:
        self.images, self.started = images, []

    async def start(self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "") -> FolderSandbox:
        self.started.append(FolderSandbox({**(self.images[image] if image else {}), **files}))
        return self.started[-1]
