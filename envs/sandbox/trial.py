"""A sandbox that is started to see whether one can be; what both backends' checks of a machine end with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from composer.contract import Finding
from composer.errors import ComposerError


def try_out(trial: Callable[[], Awaitable[None]], started: str, remedy: str) -> Finding:
    """Run a trial on an event loop of its own: the caller may be inside one. Raises nothing.

    Args:
        trial: starts and stops one sandbox.
        started: what to say if it did.
        remedy: what to do if it did not.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_await(trial))
        except BaseException as e:  # noqa: BLE001 - a check reports, it does not raise
            failure.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not failure:
        return Finding("sandbox", True, started)
    text = str(failure[0]) if isinstance(failure[0], ComposerError) else repr(failure[0])
    return Finding("sandbox", False, text, remedy)


async def _await(trial: Callable[[], Awaitable[None]]) -> None:
    await trial()
