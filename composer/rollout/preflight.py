"""What an env is asked before anything is trained: do its tests tell right from wrong, and can no agent read them?"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer.contract import SandboxBackend, SandboxLimits, Taskset
from composer.errors import ComposerError, GradingError, MachineError, TaskError
from composer.rollout.deadline import Deadline
from composer.rollout.episode import Rubric
from composer.rollout.parts import make_task
from composer.types import Outcome, Split, Task, Trajectory

_LARGEST_SOURCE = 2**20


async def check_tasks(taskset: Taskset, rubric: Rubric, backend: SandboxBackend, timeout_s: float) -> None:
    """Grade the first task of each split as it is, and the taskset's `reference` of it, if it has one.

    Args:
        taskset: makes the tasks.
        rubric: graders; those with a `check` (see `composer.contract.Grader`) say more than a score does.
        backend: starts their sandboxes.
        timeout_s: as of `Rubric.grade`.

    Raises:
        TaskError: the tests of a task cannot run, or pass on its untouched files, or fail on its reference; or the
            taskset broke.
        SandboxError, GradingError: a grader failed.
    """
    for split in Split:
        task = make_task(taskset, split, 0)
        if task.image:  # its untouched files are in there: `composer tasks check` looks at such tasks
            continue
        nobody = Trajectory(task.id, "check", "check", [], [], Outcome.FINISHED, None)
        await rubric.grade(task, task.files, backend, nobody, timeout_s)
        reference = _reference(taskset, task)
        for name, grader in rubric.graders.items():
            if hasattr(grader, "check"):
                await _check(name, grader, taskset, task, reference, backend, timeout_s)
        most = sum(max(0.0, rubric.weights.get(name, 1.0)) for name in rubric.graders)
        if nobody.reward is not None and nobody.reward >= most:
            raise TaskError(
                f"taskset {taskset.name!r}: the untouched files of task {task.id} get the full reward of {most:g}, so "
                "there is nothing to learn: break its `files`, or make the graders tell right from wrong"
            )


async def check_tools(tools: Iterable[Any], backend: SandboxBackend, limits: SandboxLimits, image: str) -> None:
    """Ask tools that need something of a sandbox, in one that no agent has been in.

    Raises:
        ToolError: it is not there: what then broke in episodes would look like the agents' doing.
        SandboxError: the sandbox failed.
    """
    asked = [tool for tool in tools if hasattr(tool, "check")]
    if not asked:
        return
    sandbox = await backend.start({}, limits, image=image)
    try:
        for tool in asked:
            await tool.check(sandbox)
    finally:
        await sandbox.stop()


_WHICH = "import shutil, sys; sys.exit(0 if shutil.which(sys.argv[1]) else 3)"


async def check_agent(
    command: Sequence[str], environment: Mapping[str, str], backend: SandboxBackend, limits: SandboxLimits, image: str
) -> None:
    """Look whether an agent's program can start in its sandboxes.

    Args:
        command: the program and its arguments.
        environment: its variables.
        backend: starts the sandbox.
        limits: of the agent's sandbox.
        image: of the sandbox.

    Raises:
        MachineError: the program, or the Python that carries its connections, is not there.
        SandboxError: the sandbox failed.
    """
    sandbox = await backend.start({}, limits, image=image)
    try:
        found = await sandbox.exec(["python3", "-c", _WHICH, command[0]], env=environment)
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
    if found.exit_code == 0:
        return
    key, remedy = f"env.agent.command={list(command)!r:.200}", "put it into the image, or into env.sandbox.args.folders"
    if found.exit_code == 3:
        raise MachineError(f"{key}: there is no program {command[0]!r} in the sandbox: {remedy}")
    said = found.output.decode(errors="replace").strip()[:200]
    raise MachineError(
        f"{key}: the sandbox has no working python3, which carries an agent's requests ({said}): {remedy}"
    )


async def _check(
    name: str,
    grader: Any,
    taskset: Taskset,
    task: Task,
    reference: Mapping[str, bytes] | None,
    backend: SandboxBackend,
    timeout_s: float,
) -> None:
    bounds_itself = getattr(grader, "bounds_itself", False)
    try:
        async with contextlib.nullcontext() if bounds_itself else Deadline(timeout_s):
            await grader.check(task, reference, backend)
    except TaskError as error:
        raise TaskError(f"taskset {taskset.name!r}: {error}") from error
    except ComposerError:
        raise
    except TimeoutError:
        raise GradingError(
            f"grader {name!r} did not check task {task.id} within {timeout_s:g} s: make it faster, "
            "or raise env.episode_timeout_s"
        ) from None
    except Exception as error:
        raise GradingError(f"grader {name!r} broke on task {task.id} ({error!r:.200}): mend its `check`") from error


def _reference(taskset: Taskset, task: Task) -> dict[str, bytes] | None:
    """The files of a right solution, if the taskset has any to offer."""
    make = getattr(taskset, "reference", None)
    if make is None:
        return None
    what = f"taskset {taskset.name!r} broke in its `reference` on task {task.id}"
    try:
        files = make(task)
    except ComposerError:
        raise
    except Exception as error:
        raise TaskError(f"{what} ({error!r:.200}): mend it") from error
    if files is not None and not (
        isinstance(files, dict) and all(isinstance(p, str) and isinstance(c, bytes) for p, c in files.items())
    ):
        raise TaskError(f"{what}: it made {files!r:.80}, which is no dictionary of paths and bytes: mend it")
    return files


def sources(parts: Iterable[object]) -> list[Path]:
    """The files in which the classes of these objects are written, as far as there are any."""
    found = set()
    for part in parts:
        try:
            path = inspect.getsourcefile(type(part))
        except TypeError:  # built in
            continue
        if path is not None and Path(path).is_file():
            found.add(Path(path).resolve())
    return sorted(found)


async def check_sight(private: Mapping[Path, str], backend: SandboxBackend, limits: SandboxLimits) -> None:
    """Look from inside an agent's sandbox for files that must not be seen there.

    Args:
        private: files of this machine, and what to do if one is seen.
        backend: starts the sandbox.
        limits: of the agent's sandbox.

    Raises:
        MachineError: one of them can be read.
        SandboxError: the sandbox failed.
    """
    sandbox = await backend.start({}, limits)
    try:
        for path, remedy in private.items():
            try:
                seen = await sandbox.read(str(path), max_bytes=_LARGEST_SOURCE)
            except OSError:
                continue
            # There may be another file of the same name.
            if seen == path.read_bytes()[:_LARGEST_SOURCE]:
                raise MachineError(f"{path} can be read in the agent's sandbox, and must not be: {remedy}")
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
