"""A sandbox stand-in for tests of the grader alone: real programs in a temporary folder, with no isolation at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from composer.contract import ExecResult, SandboxLimits


class FolderSandbox:
    """A temporary folder."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        for path, content in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)

    async def exec(self, argv, *, stdin=b"", env=None, timeout_s=None, channel=None) -> ExecResult:
        program = [sys.executable, *argv[1:]] if argv[0] == "python3" else list(argv)
        start = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *program,
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdin=channel or asyncio.subprocess.PIPE,
            stdout=channel or asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if channel else asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        if channel:
            channel.close()
        try:
            outputs = await asyncio.wait_for(process.communicate(None if channel else stdin), timeout_s)
            return ExecResult(process.returncode, outputs[bool(channel)], seconds=time.monotonic() - start)
        except TimeoutError:
            return ExecResult(-9, b"composer-grading-ready\n", timed_out=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def stop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class FolderBackend:
    """Counts its starts, waits for `gate`, and fails as often as `errors` says."""

    def __init__(self) -> None:
        self.starts, self.errors, self.gate = 0, [], None

    async def start(self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "") -> FolderSandbox:
        self.starts += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.errors:
            raise self.errors.pop()
        return FolderSandbox(files)
