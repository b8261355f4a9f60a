"""Calls the parts of an env that a user may have written, so that one that breaks its contract is named.

A model's mistake is a result that the model sees. A part's own mistake (an exception that its contract does not list,
an answer of a wrong type, a wait without an end) is an error with the part's name in it: no reward, never one of zero.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any

from composer.contract import Grade, Grader, Sandbox, SandboxBackend, Taskset, Tool, ToolResult
from composer.errors import ComposerError, GradingError, TaskError, ToolError
from composer.rollout.pool import together
from composer.types import Split, Task, ToolCall, Trajectory

_LOOK_EVERY_S = 1.0


def make_task(taskset: Taskset, split: Split, index: int) -> Task:
    """The taskset's task, if it is one.

    Raises:
        TaskError: there is no such task, the taskset broke, or what it made is no task.
    """
    what = f"{taskset.name} broke on {split} task {index}"
    with _named(what, "its `task`", TaskError):
        try:
            task = taskset.task(split, index)
        except IndexError:
            raise TaskError(f"{taskset.name} has no {split} task {index}: ask for fewer tasks or steps") from None
    if not isinstance(task, Task):
        raise TaskError(f"{what}: it made {task!r:.80}, which is no composer.types.Task: mend its `task`")
    for field in ("id", "request"):
        if not isinstance(text := getattr(task, field), str) or not _is_text(text):
            raise TaskError(f"{what}: {field}={text!r:.80} is no text: mend its `task`")
    for field in ("files", "hidden_tests"):
        for path, content in getattr(task, field).items():
            if not isinstance(path, str) or not isinstance(content, bytes):
                raise TaskError(f"{what}: {field}[{path!r:.80}] is no bytes: mend its `task` (`.encode()` a text)")
    return task


def play_expert(taskset: Taskset, task: Task, seed: int, tools: Mapping[str, Tool] | None) -> list[list[ToolCall]]:
    """The scripted expert's calls, turn by turn, if they are calls of these tools (None: of whatever tools).

    Raises:
        TaskError: the taskset has no expert, it broke, or what it plays is no call of a tool.
    """
    what = f"{taskset.name}'s expert broke on task {task.id}"
    with _named(what, "its `expert`", TaskError):
        played: list[Any] = list(taskset.expert(task, seed))
        turns = [list(turn) if isinstance(turn, list | tuple) else [turn] for turn in played]
    for call in chain.from_iterable(turns):
        if not isinstance(call, ToolCall):
            raise TaskError(f"{what}: it plays {call!r:.80}, which is no composer.types.ToolCall: mend its `expert`")
        if tools is not None and call.name not in tools:
            raise TaskError(f"{what}: it plays {call!r:.80}, and the tools are {', '.join(tools)}: mend its `expert`")
    if not all(turns) or not turns:
        nothing = "a turn without a call" if turns else "nothing"
        raise TaskError(f"{what}: it plays {nothing}; its last call must end the episode: mend its `expert`")
    return turns


async def call_tool(tool: Tool, call: ToolCall, sandbox: Sandbox) -> ToolResult:
    """What a tool answers.

    Raises:
        SandboxError: the sandbox failed.
        ToolError: the tool broke its contract.
    """
    with _named(f"tool {tool.name!r} failed", "its `call` (wrong arguments are results, not errors)", ToolError):
        result = await tool.call(call.arguments, sandbox)
    if not isinstance(result, ToolResult) or not isinstance(result.content, str):
        raise ToolError(f"tool {tool.name!r} answered {result!r:.80}, which is no ToolResult with a text: mend it")
    return result


async def begin_tools(tools: Iterable[Tool], sandbox: Sandbox) -> None:
    """Let tools that have to get ready do so in a sandbox in which no model has done anything yet.

    Raises:
        SandboxError: the sandbox failed.
        ToolError: a tool cannot get ready, which is no model's doing; or it broke its contract.
    """
    for tool in tools:
        if (begin := getattr(tool, "begin", None)) is not None:
            with _named(f"tool {tool.name!r} failed", "its `begin`", ToolError):
                await begin(sandbox)


async def grade(
    name: str,
    grader: Grader,
    task: Task,
    files: Mapping[str, bytes],
    backend: SandboxBackend,
    trajectory: Trajectory,
) -> tuple[float, Any]:
    """A grader's score, which is in [0, 1], and its details as JSON can hold them.

    Raises:
        SandboxError, GradingError, TaskError: as of `composer.contract.Grader.grade`.
        GradingError: the grader broke its contract.
    """
    with _named(f"grader {name!r} failed on task {task.id}", "its `grade`", GradingError):
        with together():
            verdict = await grader.grade(task, files, backend, trajectory)
        if not isinstance(verdict, Grade):
            raise TypeError(f"it answered {verdict!r:.80}, which is no composer.contract.Grade")
        score = float(verdict.score)
        if math.isnan(score) or not 0 <= score <= 1:
            raise ValueError(f"its score {verdict.score!r} is not in [0, 1]")
        return score, json.loads(json.dumps(verdict.details, default=str))


@contextmanager
def _named(what: str, where: str, error: type[ComposerError]) -> Iterator[None]:
    """Turn what no contract lists into `error`."""
    try:
        yield
    except ComposerError:
        raise
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise error(f"{what}: a task of its own was cancelled; mend {where}") from e
    except (Exception, SystemExit) as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        place = "" if frame.filename == __file__ else f", {frame.filename}:{frame.lineno}"
        raise error(f"{what} ({e!r:.200}{place}): mend {where}") from e


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


class BlockedLoop:
    """Watches an event loop from a thread: a part that blocks it holds up every episode, and no deadline can end it.

    Only blocking by a part is reported; the framework's own work may take its time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float, report: Callable[[str], None]) -> None:
        """Start watching.

        Args:
            loop: runs in another thread than this call's watch.
            timeout_s: how long a part may block.
            report: told once, in the watching thread, which part blocks and where.
        """
        self._loop, self._timeout_s, self._report = loop, timeout_s, report
        self._thread_id = 0
        self._beat = time.monotonic()
        threading.Thread(target=self._watch, name="blocked-loop", daemon=True).start()

    def _turn(self) -> None:
        self._thread_id, self._beat = threading.get_ident(), time.monotonic()

    def _watch(self) -> None:
        while not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:  # closed meanwhile
                return
            time.sleep(min(_LOOK_EVERY_S, self._timeout_s / 4))
            if time.monotonic() - self._beat < self._timeout_s:
                continue
            part = _part_of(sys._current_frames().get(self._thread_id))
            if part:
                self._report(
                    f"{part} and has blocked all episodes of its process for {self._timeout_s:g} s: "
                    "await what takes long, or run it by asyncio.to_thread"
                )
                return


def _part_of(frame: FrameType | None) -> str:
    """Which part runs in a frame or in one that called it, and where; empty if none does."""
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    while frame is not None:
        here = frame.f_locals
        if frame.f_code is call_tool.__code__:
            return f"tool {here['tool'].name!r} is at {where}"
        if frame.f_code is grade.__code__:
            return f"grader {here['name']!r} is at {where}"
        if frame.f_code in (make_task.__code__, play_expert.__code__):
            return f"taskset {here['taskset'].name!r} is at {where}"
        frame = frame.f_back
    return ""
