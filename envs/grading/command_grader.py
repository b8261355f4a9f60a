"""Grader `command`: a command of the task decides, in a fresh sandbox of the task's image.

The sandbox starts from the task's base state; the agent's changes and then the task's hidden files go over it. What the
command is and how it is read says the task's `Recipe`, which is in its metadata: by exit code, by pytest's summary or a
JUnit report with lists of tests that must pass, or by a reward that it writes to a file.

The solution runs in the sandbox, and mostly in the process, in which it is judged, so code that is written to forge a
report can. What holds: it starts from a clean state, and tests and their configuration are the task's. Where functions
can be called with plain data, `envs.grading.pytest_grader` with tests that run apart is the honest way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import posixpath
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer.contract import ExecResult, Grade, Sandbox, SandboxBackend, SandboxLimits
from composer.errors import GradingError, TaskError
from composer.types import Task, Trajectory
from envs.grading.clean_state import clean_state, does_not_fit
from envs.grading.reports import junit_name, not_passed, read_junit, read_summary
from envs.grading.unified_diff import apply_diff

REPORTS = ("exit_code", "pytest", "junit", "reward")
_KEY = "grading"
_MAX_REPORT_BYTES = 16 * 2**20
_NO_SUCH_COMMAND = 127


@dataclass(frozen=True)
class Recipe:
    """How a task is graded; `to_metadata` puts it into a task."""

    command: str
    """A shell's command line; `{report}` in it is the path where a JUnit report is expected."""
    report: str = "exit_code"
    """exit_code: 0 is right; pytest, junit: what they say of the tests below; reward: the number in `report_path`."""
    report_path: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    """pytest's node ids. All of both lists must pass; without any, all tests that ran, and the exit code is 0."""
    patch: str = ""
    """The hidden file that is no file but a diff of the base state."""
    hidden_folder: str = ""
    """Where hidden files go; "": the working directory."""
    restores_tests: bool = True
    """Whether the agent's changes of tests and of their configuration are undone (`clean_state`)."""
    timeout_s: float = 0.0
    """Wall time of the command; 0: that of the task's metadata (`timeout_s`), or the grader's own."""

    def to_metadata(self) -> dict[str, Any]:
        """What a task's metadata takes up; JSON-ready."""
        return {_KEY: dataclasses.asdict(self)}

    @classmethod
    def of(cls, task: Task) -> Recipe:
        """The recipe in a task's metadata.

        Raises:
            TaskError: there is none, or it is not as it has to be.
        """
        try:
            recipe = cls(**task.metadata[_KEY])
        except KeyError:
            raise TaskError(
                f"Task {task.id} does not say how it is graded: its metadata needs {_KEY!r}, "
                "or its env another grader than CommandGrader."
            ) from None
        except TypeError as error:
            raise TaskError(f"Task {task.id}: metadata[{_KEY!r}] is no recipe of CommandGrader ({error}).") from None
        if recipe.report not in REPORTS:
            raise TaskError(f"Task {task.id}: report={recipe.report!r} must be one of {', '.join(REPORTS)}.")
        if recipe.patch and recipe.patch not in task.hidden_tests:
            raise TaskError(f"Task {task.id}: its patch {recipe.patch!r} is none of its hidden files.")
        return recipe


class CommandGrader:
    """1.0 or 0.0 by the task's command; whatever it writes if it writes a reward."""

    name = "command"
    bounds_itself = True
    """A run has `limits.lifetime_s`; before it, the grader queues for one of `concurrency` places."""

    def __init__(
        self,
        timeout_s: float = 300.0,
        memory_bytes: int = 2 * 2**30,
        disk_bytes: int = 2**30,
        num_processes: int = 256,
        concurrency: int = 4,
        max_state_bytes: int = 256 * 2**20,
    ) -> None:
        """Choose what a run of a command may use.

        Args:
            timeout_s: wall time of the command, in seconds, where the task says nothing else.
            memory_bytes: memory of a grading sandbox.
            disk_bytes: what may be written in it.
            num_processes: in it at a time.
            concurrency: gradings at a time.
            max_state_bytes: of all files in the working directory of an image.

        Raises:
            ValueError: a value is too small.
        """
        for name, value, least in (
            ("timeout_s", timeout_s, 0.1),
            ("memory_bytes", memory_bytes, 32 * 2**20),
            ("disk_bytes", disk_bytes, 2**20),
            ("num_processes", num_processes, 4),
            ("concurrency", concurrency, 1),
            ("max_state_bytes", max_state_bytes, 1),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, but is {value} instead")
        self.timeout_s, self.max_state_bytes = timeout_s, max_state_bytes
        self.limits = SandboxLimits(
            memory_bytes=memory_bytes,
            num_processes=num_processes,
            disk_bytes=min(disk_bytes, memory_bytes // 2),
            output_bytes=2**20,
        )
        self._slots = asyncio.Semaphore(concurrency)

    async def grade(
        self, task: Task, files: Mapping[str, bytes], backend: SandboxBackend, trajectory: Trajectory | None = None
    ) -> Grade:
        """Run the task's command on what the agent left behind.

        Args:
            task: base state, hidden files and recipe.
            files: the final state of the agent's working directory, all of it.
            backend: starts the grading sandbox.
            trajectory: not looked at.

        Raises:
            SandboxError: the grading sandbox failed.
            GradingError: it hangs, lacks what the command needs, or does not let hidden files in.
            TaskError: the task has no recipe, or its patch does not fit its base state.
        """
        recipe = Recipe.of(task)
        timeout_s = recipe.timeout_s or float(task.metadata.get("timeout_s") or self.timeout_s)
        limits = dataclasses.replace(
            self.limits, cpu_seconds=max(1, round(timeout_s)), exec_timeout_s=timeout_s, lifetime_s=timeout_s + 120
        )
        run = _Run(task, recipe, backend, limits, timeout_s, self.max_state_bytes)
        async with self._slots:
            try:
                async with asyncio.timeout(limits.lifetime_s):
                    return await run.grade(files)
            except TimeoutError:
                raise GradingError(
                    f"The grading sandbox of task {task.id} did not end within {limits.lifetime_s:g} s."
                ) from None


@dataclass(frozen=True)
class _Run:
    """One grading."""

    task: Task
    recipe: Recipe
    backend: SandboxBackend
    limits: SandboxLimits
    timeout_s: float
    max_state_bytes: int

    async def grade(self, final: Mapping[str, bytes]) -> Grade:
        task, state = self.task, {}
        if not task.image:
            state = self._state(task.files, final)
            if reason := does_not_fit(task, state, self.limits):
                return _grade(0.0, reason, ExecResult(0, b""))
            sandbox = await self.backend.start(state, self.limits)
        else:
            sandbox = await self.backend.start(task.files, self.limits, image=task.image)
        try:
            if task.image:
                await self._bring_to(sandbox, final)
            if folder := self.recipe.hidden_folder:
                for path, content in self._hidden().items():
                    await self._put(sandbox, posixpath.join(folder, path), content)
            return await self._run(sandbox)
        finally:
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))

    def _hidden(self) -> dict[str, bytes]:
        return {path: content for path, content in self.task.hidden_tests.items() if path != self.recipe.patch}

    def _state(self, base: Mapping[str, bytes], final: Mapping[str, bytes]) -> dict[str, bytes]:
        """The working directory to grade: the agent's, with the tests' own files."""
        hidden = {} if self.recipe.hidden_folder else self._hidden()
        gone: list[str] = []
        if self.recipe.patch:
            try:
                changed = apply_diff(self.task.hidden_tests[self.recipe.patch], base)
            except ValueError as error:
                raise TaskError(f"The patch of the tests of task {self.task.id} cannot be applied: {error}.") from None
            hidden |= {path: content for path, content in changed.items() if content is not None}
            gone = [path for path, content in changed.items() if content is None]
        if self.recipe.restores_tests:
            state = clean_state(dataclasses.replace(self.task, files=dict(base), hidden_tests=hidden), final)
        else:
            state = {**final, **hidden}
        return {path: content for path, content in state.items() if path not in gone}

    async def _bring_to(self, sandbox: Sandbox, final: Mapping[str, bytes]) -> None:
        """Make the sandbox of an image what is to be graded; what is alike is left alone, and so keeps its mode."""
        try:
            base = await sandbox.files(self.max_state_bytes)
        except OSError as error:
            raise GradingError(
                f"The files of image {self.task.image} of task {self.task.id} cannot be collected "
                f"({error.strerror or error}): raise max_state_bytes={self.max_state_bytes}, or use a smaller image."
            ) from None
        state = self._state(base, final)
        if gone := base.keys() - state.keys():
            paths = "".join(f"./{path}\0" for path in gone).encode(errors="surrogateescape")
            removed = await sandbox.exec(["xargs", "-0", "rm", "-f", "--"], stdin=paths)
            if removed.exit_code:
                raise GradingError(
                    f"{len(gone)} files that were deleted cannot be removed from the grading sandbox of task "
                    f"{self.task.id}: {_shown(removed)}."
                )
        for path, content in state.items():
            if base.get(path) != content:
                await self._put(sandbox, path, content)

    async def _put(self, sandbox: Sandbox, path: str, content: bytes) -> None:
        try:
            await sandbox.write(path, content)
        except OSError as error:
            raise GradingError(
                f"{path} of task {self.task.id} cannot be put into its grading sandbox "
                f"({error.strerror or type(error).__name__}): its user must be able to write there."
            ) from None

    async def _run(self, sandbox: Sandbox) -> Grade:
        recipe = self.recipe
        # A name that nothing which the agent left behind can know.
        report_path = recipe.report_path or f"/tmp/report-{secrets.token_hex(16)}.xml"
        command = recipe.command.replace("{report}", shlex.quote(report_path))
        result = await sandbox.exec(["sh", "-c", command], timeout_s=self.timeout_s)
        if result.exit_code == _NO_SUCH_COMMAND and not result.timed_out:
            raise GradingError(f"The image of task {self.task.id} lacks what its tests are run with: {_shown(result)}.")
        if result.timed_out:
            return _grade(0.0, f"the tests did not end within {self.timeout_s:g} s", result)
        if recipe.report == "reward":
            return await self._reward(sandbox, report_path, result)
        if recipe.report == "exit_code":
            return _grade(float(result.exit_code == 0), f"the command failed: {_shown(result)}", result)
        required = [*recipe.fail_to_pass, *recipe.pass_to_pass]
        try:
            if recipe.report == "junit":
                found = read_junit(await sandbox.read(report_path, _MAX_REPORT_BYTES))
                required = list(map(junit_name, required))
            else:
                found = read_summary(result.output)
        except (OSError, ValueError) as error:
            reason = f"there is no report of the tests ({getattr(error, 'strerror', None) or error}): {_shown(result)}"
            return _grade(0.0, reason, result)
        return _verdict(found, required, result)

    async def _reward(self, sandbox: Sandbox, path: str, result: ExecResult) -> Grade:
        """What was written to the file, or to the .json of its name."""
        text = ""
        for place in (path, f"{posixpath.splitext(path)[0]}.json"):
            try:
                text = (await sandbox.read(place, _MAX_REPORT_BYTES)).decode(errors="replace").strip()
            except OSError:
                continue
            break
        if not text:
            return _grade(0.0, f"the command wrote no reward to {path}: {_shown(result)}", result)
        try:
            value = json.loads(text)
            score = float(value["reward"] if isinstance(value, dict) else value)
        except (ValueError, TypeError, KeyError, RecursionError):
            return _grade(0.0, f"the command wrote {text[:80]!r} to {path}, which is no number", result)
        if math.isnan(score) or not 0.0 <= score <= 1.0:
            return _grade(0.0, f"the command wrote {score} to {path}, which is not in [0, 1]", result)
        return _grade(score, f"the command wrote a reward of {score:g}: {_shown(result)}", result)


def _verdict(found: Mapping[str, bool], required: list[str], result: ExecResult) -> Grade:
    passed = sum(found.values())
    numbers = {"num_passed": passed, "num_expected": len(required) or len(found)}
    if required:
        missing = not_passed(dict(found), required)
        reason = f"{len(missing)} of {len(required)} tests did not pass, {missing[0]} among them" if missing else ""
    elif not found:
        reason = f"no test is in the report: {_shown(result)}"
    elif passed < len(found):
        reason = f"{len(found) - passed} tests failed, {next(n for n, ok in found.items() if not ok)} among them"
    else:
        reason = f"the tests passed, but the command failed: {_shown(result)}" if result.exit_code else ""
    return _grade(0.0 if reason else 1.0, reason, result, **numbers)


def _grade(score: float, reason: str, result: ExecResult, **numbers: int) -> Grade:
    return Grade(score, {"reason": "" if score == 1.0 else reason, "seconds": result.seconds, **numbers})


def _shown(result: ExecResult) -> str:
    said = " ".join(result.output[-300:].decode(errors="replace").split()) or "no output"
    return f"exit code {result.exit_code}: {said}"
