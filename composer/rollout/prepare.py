"""A sandbox of a task, as an agent finds it: started with the task's files, and made ready by the task's setup."""

from __future__ import annotations

import asyncio

from composer.contract import Sandbox, SandboxBackend, SandboxLimits
from composer.errors import TaskError
from composer.types import Task

_SHOWN_BYTES = 300


async def prepare(task: Task, backend: SandboxBackend, limits: SandboxLimits) -> Sandbox:
    """Start a sandbox and run the task's setup in it, within `limits.lifetime_s` and as the sandbox's user.

    The setup runs in a process of its own: the agent's shell knows nothing of it.

    Raises:
        SandboxStartError: it could not start.
        SandboxError: it failed.
        TaskError: the setup failed; nothing of the sandbox is left.
    """
    sandbox = await backend.start(task.files, limits, image=task.image)
    if not task.setup:
        return sandbox
    try:
        done = await sandbox.exec(["sh", "-c", task.setup], timeout_s=limits.lifetime_s)
        if done.timed_out or done.exit_code:
            end = "did not end in time" if done.timed_out else f"ended with exit code {done.exit_code}"
            said = " ".join(done.output[-_SHOWN_BYTES:].decode(errors="replace").split()) or "no output"
            raise TaskError(f"the setup of task {task.id} {end} ({said}): mend it, or the task's image")
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
        raise
    return sandbox
