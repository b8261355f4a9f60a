"""A sandbox of a task, as an agent finds it: started with the task's files, and made ready by the task's setup.

What takes long is done once for all siblings of a group: they, and the graders, start from a snapshot of that state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from composer.contract import Sandbox, SandboxBackend, SandboxLimits, Snapshot
from composer.errors import SandboxError, SnapshotGoneError, TaskError
from composer.rollout.deadline import not_counted
from composer.types import Task

OWN_S = 300.0
"""Of a sandbox's life, for what the framework does in it: starting, checkpoints, looking at the files, collecting."""

_SHOWN_BYTES = 300
_MANY_FILES, _MANY_BYTES = 256, 2**20
"""To start with more than these takes longer than to start from a snapshot."""


def agents_limits(task: Task, limits: SandboxLimits) -> SandboxLimits:
    """The limits of an agent's sandbox: with the network that its backend allows, as it was when the task was new.

    What no agent works in (graders, the checks before a run) has none.
    """
    return replace(limits, network=True, packages_before=task.date)


async def prepare(task: Task, backend: SandboxBackend, limits: SandboxLimits) -> Sandbox:
    """Start an agent's sandbox and run the task's setup in it, within `limits.lifetime_s` and as the sandbox's user.

    The setup runs in a process of its own: the agent's shell knows nothing of it. After it, the sandbox lives for
    `limits.lifetime_s` and what the framework needs.

    Raises:
        SandboxStartError: it could not start.
        SandboxError: it failed.
        TaskError: the setup failed; nothing of the sandbox is left.
    """
    limits_of_all = living(agents_limits(task, limits), bool(task.setup))
    sandbox = await backend.start(task.files, limits_of_all, image=task.image)
    if not task.setup:
        return sandbox
    try:
        done = await sandbox.exec(["sh", "-c", task.setup], timeout_s=limits.lifetime_s)
        if done.timed_out or done.exit_code:
            end = "did not end in time" if done.timed_out else f"ended with exit code {done.exit_code}"
            said = " ".join(done.output[-_SHOWN_BYTES:].decode(errors="replace").split()) or "no output"
            raise TaskError(f"the setup of task {task.id} {end} ({said}): mend it, or the task's image")
    except BaseException:
        await _stop(sandbox)
        raise
    return sandbox


def living(limits: SandboxLimits, has_setup: bool = False) -> SandboxLimits:
    """Limits of a sandbox whose life is not over before the time is that an agent, and a setup, have in it.

    A life begins before the sandbox has started, and ends with an error of the machine. Whoever overstays has to meet
    the deadline of the work first, which says whose fault that is.
    """
    return replace(limits, lifetime_s=limits.lifetime_s * (2 if has_setup else 1) + OWN_S)


@contextlib.asynccontextmanager
async def prepared(
    task: Task, backend: SandboxBackend, limits: SandboxLimits, num_siblings: int = 1
) -> AsyncIterator[PreparedTask]:
    """A task for as long as its episodes run; nothing is prepared before the first of them starts."""
    state = PreparedTask(task, backend, limits, num_siblings)
    try:
        yield state
    finally:
        await state.close()


class PreparedTask:
    """One task, as its siblings and their graders share it."""

    def __init__(self, task: Task, backend: SandboxBackend, limits: SandboxLimits, num_siblings: int) -> None:
        """Use `prepared`; `limits` are those of the agents' sandboxes."""
        self.task, self.agents_backend, self._limits = task, backend, agents_limits(task, limits)
        many = len(task.files) > _MANY_FILES or sum(map(len, task.files.values())) > _MANY_BYTES
        self._is_shared = num_siblings > 1 and (many or bool(task.setup))
        self._lock, self._emptying = asyncio.Lock(), asyncio.Lock()
        self._base: Snapshot | None = None
        self._bare: Snapshot | None = None
        self._failure: TaskError | None = None
        # One for all siblings: graders remember verdicts by backend.
        self.backend = cast("SandboxBackend", _ForGraders(self, backend)) if task.setup else backend
        """For graders: what they start has been made ready too, if the task has a setup."""

    async def start(self) -> Sandbox:
        """A sandbox for an agent.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `prepare`; or there is no room for a snapshot.
        """
        if not self._is_shared:
            return await prepare(self.task, self.agents_backend, self._limits)
        async with self._lock:
            if self._base is None:
                # Whoever comes first gets the very sandbox of which the snapshot is.
                return await self._prepare()
        return await self.start_on(self.base, {}, living(self._limits))

    async def start_from(self, path: Path) -> Sandbox:
        """A sandbox for an agent with the files that a sandbox of this task had when they were saved.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError, SandboxStartError: it is no saved state, or the sandbox could not start.
        """
        snapshot = await self.agents_backend.load(path)
        try:
            return await self.agents_backend.start({}, living(self._limits), base=snapshot)
        finally:
            await self.agents_backend.drop(snapshot)

    async def base(self) -> Snapshot:
        """The prepared state.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `start`.
        """
        with not_counted():  # whoever asks is a grader, and cannot know what there is to prepare
            async with self._lock:
                if self._base is None:
                    await _stop(await self._prepare())
                assert self._base is not None
                return self._base

    async def bare(self) -> Snapshot:
        """The prepared state without what is in the working directory.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `start`.
        """
        with not_counted():
            async with self._emptying:
                if self._bare is None:
                    self._bare = await self._empty()
                return self._bare

    async def start_on(
        self, state: Callable[[], Awaitable[Snapshot]], files: Mapping[str, bytes], limits: SandboxLimits
    ) -> Sandbox:
        """A sandbox that starts from `base` or `bare`.

        If the state has vanished (somebody cleaned the disk, the backend began anew) it is prepared once more: the task
        is still what it was.

        Raises:
            SandboxError, SandboxStartError, TaskError: as of `start`.
        """
        found = await state()
        try:
            return await self.agents_backend.start(files, limits, base=found)
        except SnapshotGoneError:
            await self._forget(found)
        return await self.agents_backend.start(files, limits, base=await state())

    async def _forget(self, gone: Snapshot) -> None:
        # A sibling may have met this first, and made another already.
        if self._base is gone:
            self._base = None
        if self._bare is gone:
            self._bare = None
        await self.agents_backend.drop(gone)

    async def _empty(self) -> Snapshot:
        sandbox = await self.start_on(self.base, {}, self._limits)
        try:
            done = await sandbox.exec(["find", ".", "-mindepth", "1", "-delete"])
            if done.exit_code:
                said = " ".join(done.output[-_SHOWN_BYTES:].decode(errors="replace").split())
                raise TaskError(f"what the setup of task {self.task.id} made cannot be removed again ({said})")
            return await self._keep(sandbox)
        finally:
            await _stop(sandbox)

    async def _prepare(self) -> Sandbox:
        if self._failure is not None:
            raise self._failure
        try:
            sandbox = await prepare(self.task, self.agents_backend, self._limits)
        except TaskError as error:
            self._failure = error  # it would be the same for each sibling
            raise
        try:
            self._base = await self._keep(sandbox)
        except BaseException:
            await _stop(sandbox)
            raise
        return sandbox

    async def _keep(self, sandbox: Sandbox) -> Snapshot:
        try:
            return await sandbox.snapshot()
        except OSError as error:
            raise SandboxError(
                f"there is no room for a snapshot of task {self.task.id} ({error.strerror or error}): "
                "raise snapshot_bytes in env.sandbox.args, or lower env.concurrency"
            ) from error

    async def close(self) -> None:
        """Forget the snapshots. Raises nothing."""
        for snapshot in (self._base, self._bare):
            if snapshot is not None:
                await self.agents_backend.drop(snapshot)
        self._base = self._bare = None


class _ForGraders:
    """A backend whose sandboxes have been made ready by a task's setup, as the agent's had been."""

    def __init__(self, state: PreparedTask, backend: SandboxBackend) -> None:
        self._state, self._backend = state, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        task = self._state.task
        if base is None and image and image == task.image:
            # With the task's own files: the setup came after them.
            return await self._state.start_on(self._state.base, {} if files == task.files else files, limits)
        if base is None and not image:
            return await self._state.start_on(self._state.bare, files, limits)
        return await self._backend.start(files, limits, image=image, base=base)


async def _stop(sandbox: Sandbox) -> None:
    """Stop for certain, also when the caller is being cancelled."""
    await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
