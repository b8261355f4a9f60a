"""Is a taskset fit to be trained on? Its first tasks are graded, untouched and solved, several times over.

A task is ok if its reference gets the full reward and its untouched state does not, every time alike. Verdicts come
from graders that remember nothing.

A task with an image has its base state in there, so its untouched files are collected from a sandbox. And a taskset may
solve such tasks by a command: `solver(task) -> tuple[dict[str, bytes], str] | None` are files to write into a sandbox
of the task and the shell command that then makes its files right; it is asked where `reference` is missing or None.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from composer.contract import SandboxBackend, SandboxLimits, Taskset
from composer.errors import ComposerError, TaskError
from composer.rollout.episode import Rubric
from composer.rollout.parts import make_task
from composer.rollout.prepare import prepare, prepared
from composer.types import Outcome, Split, Task, Trajectory

_MAX_REASON = 300
Files = dict[str, bytes]


class Verdict(StrEnum):
    """What a task is worth."""

    OK = "ok"
    FLAKY = "flaky"
    """Equal files were graded differently."""
    TRIVIAL = "trivial"
    """The untouched state gets the full reward."""
    BROKEN_REFERENCE = "broken reference"
    """The reference does not get the full reward."""
    CANNOT_RUN = "cannot run"
    """There is no verdict: `reason` says what failed."""


@dataclass(frozen=True)
class TaskCheck:
    """What became of one task."""

    id: str
    """`<taskset>/<split>/<index>` of what could not be made."""
    split: Split
    index: int
    verdict: Verdict
    reason: str = ""
    """Why it is not ok; of one that is ok, what was not looked at."""
    seconds: float = 0.0
    """Wall time of all its gradings, with the wait in the graders' queues."""
    untouched: list[float] = field(default_factory=list)
    """Rewards of the untouched state, round by round."""
    reference: list[float] = field(default_factory=list)
    """Rewards of the reference; empty if there is none."""
    doubts: list[str] = field(default_factory=list)
    """Whatever its verdict: what in its grading is within reach of the agent's code, by its graders' own word."""


@dataclass(frozen=True)
class TasksetCheck:
    """What became of all tasks that were looked at, in order."""

    taskset: str
    rounds: int
    tasks: list[TaskCheck]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every task is ok, and there is one."""
        return bool(self.tasks) and all(task.verdict is Verdict.OK for task in self.tasks)


@dataclass(frozen=True)
class CheckSettings:
    """How much is looked at, and for how long."""

    num_tasks: int = 20
    """Of each split, from index 0; a split that has fewer ends there."""
    rounds: int = 5
    concurrency: int = 4
    """Tasks at a time."""
    grading_timeout_s: float = 120.0
    """As of `Rubric.grade`."""
    task_timeout_s: float = 3600.0
    """Wall time of all rounds of a task."""
    deadline_s: float = 6 * 3600.0
    """Wall time of everything; tasks that are not done by then cannot be run."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of the sandboxes in which base states are collected and solvers run."""


async def check_taskset(
    taskset: Taskset,
    rubric: Rubric,
    backend: SandboxBackend,
    settings: CheckSettings | None = None,
    *,
    splits: Sequence[Split] = tuple(Split),
    progress: Callable[[TaskCheck], None] = lambda task: None,
) -> TasksetCheck:
    """Look at the first tasks of the splits. Failures are part of the result; raises nothing of its own.

    Args:
        taskset: makes the tasks.
        rubric: grades them. A grader's `memoise`, if it has one, is off in the copies that are used here.
        backend: starts the sandboxes.
        settings: how much, and for how long.
        splits: which splits.
        progress: told of each task when it is done.
    """
    settings = settings or CheckSettings()
    start = time.monotonic()
    rubric = Rubric({name: _forgetful(grader) for name, grader in rubric.graders.items()}, rubric.weights)
    slots = asyncio.Semaphore(settings.concurrency)

    async def look(split: Split, index: int) -> TaskCheck | None:
        made = _make(taskset, split, index)
        if isinstance(made, Task):
            left_s = settings.deadline_s - (time.monotonic() - start)
            try:
                async with asyncio.timeout(max(0.0, left_s)), slots:
                    made = await _Look(taskset, rubric, backend, settings, split, index, made).run()
            except TimeoutError:
                reason = f"it was not done when the check's {settings.deadline_s:g} s were over"
                made = TaskCheck(made.id, split, index, Verdict.CANNOT_RUN, reason)
        if made is not None:
            progress(made)
        return made

    places = [(split, index) for split in splits for index in range(_num_distinct(taskset, split, settings.num_tasks))]
    looked = await asyncio.gather(*(look(split, index) for split, index in places))
    tasks = [check for check in looked if check is not None]
    return TasksetCheck(taskset.name, settings.rounds, tasks, time.monotonic() - start)


def _num_distinct(taskset: Taskset, split: Split, most: int) -> int:
    """How many to look at: one that training goes through again and again is looked at once."""
    ask = getattr(taskset, "num_tasks", None)
    num = ask(split, distinct=True) if ask is not None else None
    return most if num is None else min(most, max(1, num))  # the first of none says why there is none


def _make(taskset: Taskset, split: Split, index: int) -> Task | TaskCheck | None:
    """The task, or why there is none; None if the split has ended before."""
    try:
        return make_task(taskset, split, index)
    except ComposerError as error:
        if index > 0 and str(error).startswith(f"{taskset.name} has no {split} task {index}:"):
            return None
        return TaskCheck(f"{taskset.name}/{split}/{index}", split, index, Verdict.CANNOT_RUN, _one_line(str(error)))


@dataclass(frozen=True)
class _Look:
    """One task under scrutiny."""

    taskset: Taskset
    rubric: Rubric
    backend: SandboxBackend
    settings: CheckSettings
    split: Split
    index: int
    task: Task
    untouched: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    async def run(self) -> TaskCheck:
        """The verdict."""
        start, verdict = time.monotonic(), Verdict.CANNOT_RUN
        deadline = asyncio.timeout(self.settings.task_timeout_s)
        try:
            async with deadline:
                verdict, reason = await self._judge(self.task)
        except ComposerError as error:
            reason = str(error)
        except Exception as error:  # a part that breaks its contract costs one task, not the report
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = f"its gradings did not end within {self.settings.task_timeout_s:g} s"
        return TaskCheck(
            self.task.id,
            self.split,
            self.index,
            verdict,
            _one_line(reason),
            time.monotonic() - start,
            self.untouched,
            self.reference,
            self.doubts,
        )

    async def _judge(self, task: Task) -> tuple[Verdict, str]:
        asked = (getattr(grader, "doubt", lambda task: "")(task) for grader in self.rubric.graders.values())
        self.doubts.extend(doubt for doubt in asked if doubt)
        untouched = await self._base_state(task)
        solved = await self._reference(task, untouched)
        why = ""
        for _ in range(self.settings.rounds):
            reward, _ = await self._grade(task, untouched)
            self.untouched.append(reward)
            if solved is not None:
                reward, why_now = await self._grade(task, solved)
                self.reference.append(reward)
                why = why or why_now
        most = sum(max(0.0, self.rubric.weights.get(name, 1.0)) for name in self.rubric.graders)
        for what, rewards in (("the untouched state", self.untouched), ("the reference", self.reference)):
            if len(set(rewards)) > 1:
                counts = ", ".join(f"{reward:g} x {num}" for reward, num in sorted(Counter(rewards).items()))
                said = f": {why}" if why and rewards is self.reference else ""
                return Verdict.FLAKY, f"{what} was graded {counts}{said}"
        if self.untouched[0] >= most:
            return Verdict.TRIVIAL, f"the untouched state gets the full reward of {most:g}"
        if solved is None:
            return Verdict.OK, "there is no reference: only the untouched state was graded"
        if self.reference[0] < most:
            return Verdict.BROKEN_REFERENCE, why or f"the reference gets {self.reference[0]:g} of {most:g}"
        return Verdict.OK, ""

    async def _grade(self, task: Task, files: Mapping[str, bytes]) -> tuple[float, str]:
        """The reward, and what a grader that was not content says."""
        t = Trajectory(task.id, "check", "check", [], [], Outcome.FINISHED, None)
        async with prepared(task, self.backend, self.settings.limits) as state:
            await self.rubric.grade(task, files, state.backend, t, self.settings.grading_timeout_s)
        reasons = (t.metadata[name].get("reason", "") for name in t.rewards if isinstance(t.metadata[name], dict))
        return t.reward or 0.0, next((str(reason) for reason in reasons if reason), "")

    async def _base_state(self, task: Task) -> Files:
        return await self._collect(task, {}, "") if task.image or task.setup else task.files

    async def _reference(self, task: Task, untouched: Files) -> Files | None:
        """The files of a right solution, as far as the taskset knows any."""
        files = _asked(self.taskset, "reference", task)
        if files is not None:
            if not isinstance(files, dict) or not all(isinstance(content, bytes) for content in files.values()):
                raise TaskError(
                    f"taskset {self.taskset.name!r}: `reference` of task {task.id} made {files!r:.80}: mend it"
                )
            # It does not know what else is in an image.
            return {**untouched, **files} if task.image else files
        solver = _asked(self.taskset, "solver", task)
        if solver is None:
            return None
        extra, command = solver
        return await self._collect(task, extra, command)

    async def _collect(self, task: Task, extra: Mapping[str, bytes], command: str) -> Files:
        """Every file of a sandbox of the task after a command."""
        limits = self.settings.limits
        sandbox = await prepare(task, self.backend, limits)
        try:
            for path, content in extra.items():
                await sandbox.write(path, content)
            if command:
                done = await sandbox.exec(["sh", "-c", command], timeout_s=self.settings.grading_timeout_s)
                if done.timed_out or done.exit_code:
                    end = "did not end in time" if done.timed_out else f"ended with exit code {done.exit_code}"
                    said = " ".join(done.output[-_MAX_REASON // 2 :].decode(errors="replace").split())
                    raise TaskError(f"the solver of task {task.id} {end}: {said or 'no output'}")
            files = await sandbox.files(sum(map(len, task.files.values())) + limits.disk_bytes)
            return {path: content for path, content in files.items() if path not in extra}
        finally:
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))


def _asked(taskset: Taskset, method: str, task: Task) -> Any:
    """What an optional method of the taskset answers; None if it has none."""
    ask = getattr(taskset, method, None)
    if ask is None:
        return None
    try:
        return ask(task)
    except ComposerError:
        raise
    except Exception as error:
        raise TaskError(
            f"taskset {taskset.name!r} broke in its `{method}` on task {task.id} ({error!r:.200})"
        ) from error


def _forgetful(grader: Any) -> Any:
    """The grader, or a copy of it that grades equal files anew each time."""
    if not getattr(grader, "memoise", False):
        return grader
    grader = copy.copy(grader)
    grader.memoise = False
    return grader


def _one_line(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 3]}..."


def render_check(check: TasksetCheck, width: int = 100) -> list[str]:
    """Lines of text: a table of the tasks, a sum for each split, and what its graders doubt.

    Args:
        check: the result.
        width: longest line, in characters; reasons are cut.
    """
    rows = [("task", "verdict", "seconds", "reason")]
    rows += [(t.id, t.verdict.value, f"{t.seconds:.1f}", t.reason) for t in check.tasks]
    first, second, third = (max(len(row[i]) for row in rows) for i in range(3))
    lines = []
    for name, verdict, seconds, reason in rows:
        line = f"{name:<{first}}  {verdict:<{second}}  {seconds:>{third}}  {reason}".rstrip()
        lines.append(line if len(line) <= width else f"{line[: width - 3]}...")
    lines.append("")
    for split in Split:
        verdicts = Counter(task.verdict for task in check.tasks if task.split is split)
        if verdicts:
            parts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in Verdict if verdicts[verdict])
            lines.append(f"{split}: {verdicts.total()} tasks, {check.rounds} rounds each: {parts}")
    doubts = Counter(doubt for task in check.tasks for doubt in task.doubts)
    lines += [f"beware: {num} of {len(check.tasks)} tasks: {doubt}" for doubt, num in doubts.most_common()]
    if not check.tasks:
        lines.append(f"{check.taskset} has no tasks")
    return lines


def check_to_dict(check: TasksetCheck) -> dict[str, Any]:
    """The result as JSON can hold it; tasksets take it as their `checked`."""
    d = asdict(check)
    d["num_ok"] = sum(task.verdict is Verdict.OK for task in check.tasks)
    d["ok"] = check.ok
    return d
