"""Several sandboxes at a time, as one grading needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from composer.contract import Sandbox, SandboxBackend, SandboxLimits


@asynccontextmanager
async def several(
    backend: SandboxBackend,
    states: Sequence[Mapping[str, bytes]],
    limits: SandboxLimits,
    image: str,
    work_s: float,
) -> AsyncIterator[list[Sandbox]]:
    """Fresh sandboxes, started at once; all are stopped, also where one of them did not start.

    Args:
        backend: starts them.
        states: the files of each.
        limits: of each.
        image: of all of them.
        work_s: wall time of what is done with them, from when the last one is there.

    Raises:
        TimeoutError: `work_s` were over.
        SandboxStartError: one of them could not start.
    """
    starting = [asyncio.ensure_future(backend.start(files, limits, image=image)) for files in states]
    try:
        sandboxes = await asyncio.gather(*starting)
        async with asyncio.timeout(work_s):
            yield sandboxes
    finally:
        await asyncio.shield(asyncio.ensure_future(_stop_all(starting)))


async def _stop_all(starting: Sequence[asyncio.Future[Sandbox]]) -> None:
    await asyncio.wait(starting)
    started = [start.result() for start in starting if not start.cancelled() and start.exception() is None]
    await asyncio.gather(*(sandbox.stop() for sandbox in started))
