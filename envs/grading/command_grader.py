"""Grader `command`: a command of the task decides, in a fresh sandbox of the task's image.

The sandbox starts from the task's base state; the agent's changes and then the task's hidden files go over it. What the
command is and how it is read says the task's `Recipe`, which is in its metadata: by exit code, by pytest's summary or a
JUnit report with lists of tests that must pass, or by a reward that it writes to a file.

What holds: the sandbox starts from a clean state, and what decides there (tests, their configuration, what runs them)
is the task's. Where the command runs pytest, whatever lies between them, results and exit code come from a process that
the solution cannot look into: ending early, printing a verdict, writing a report, skipping tests from inside do not
work (reporter.py, origins.py). What does not hold: the solution runs in the sandbox, and mostly in the process, in
which it is judged, so code that looks for pytest's or the tests' objects in memory can forge; and of programs other
than pytest, exit code and report are their own word. Where functions can be called with plain data,
`envs.grading.pytest_grader` with tests that run apart is the honest way. docs/attacks.md says more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import posixpath
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.contract import ExecResult, Grade, Sandbox, SandboxBackend, SandboxLimits
from composer.errors import GradingError, TaskError
from composer.types import Task, Trajectory
from envs.grading.clean_state import CONFIG_FILES, clean_state, does_not_fit, test_files
from envs.grading.placing import DoesNotFitError, bring_to, put
from envs.grading.recipe import Recipe
from envs.grading.reporter import ORIGINS, TESTS
from envs.grading.reports import junit_name, not_passed, read_junit, read_summary
from envs.grading.unified_diff import apply_diff

_MAX_REPORT_BYTES = 16 * 2**20
_NO_SUCH_COMMAND = 127
_AROUND_S = 120.0
"""Of a run, for all but its command."""
_STARTS_S = 60.0
"""Of a sandbox's life, until it has started."""
_REPORT = re.compile(rb"\n[0-9a-f]{32}\{.*\}\n")
"""A supervisor's, as it is printed."""
_MAX_REMEMBERED = 4096
_NOTHING_RAN = ExecResult(0, b"")
_HERE = Path(__file__).parent
_PLUGIN = {".py": (_HERE / "reporter.py").read_bytes(), f"{ORIGINS}.py": (_HERE / "origins.py").read_bytes()}
"""By what its name goes on with: the plugin that goes into the sandbox."""
_READY = b"composer-grading-ready"
_SUPERVISED = """\
if [ -r {folder}/{plugin}.py ]; then
    export COMPOSER_GRADING_COMMAND=on PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}
    export PYTEST_ADDOPTS="-p {plugin}${{PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}}"
fi
"""
"""Goes before a task's command, so that each pytest below it has a supervisor."""


class CommandGrader:
    """1.0 or 0.0 by the task's command; whatever it writes if it writes a reward."""

    name = "command"
    bounds_itself = True
    """A run has its command's time and `_AROUND_S` from when its sandbox is there; before, it queues for a place."""

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
            output_bytes=2**23,  # the report of some ten thousand tests
        )
        self._slots = asyncio.Semaphore(concurrency)
        self._supervised: dict[bytes, bool] = {}
        """Whether pytest's supervisor begins in a task's base state; asked only where it did not, for a reward."""

    def doubt(self, task: Task) -> str:
        """What in the grading of a task is within reach of the agent's code; see `composer.contract.Grader`.

        Raises:
            TaskError: the task has no recipe.
        """
        if "pytest" in Recipe.of(task).command:
            return "its tests run in the solution's process: code there can forge"
        return "its command is believed: code of the solution that it runs can forge what it says"

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
            self.limits,
            cpu_seconds=max(1, round(timeout_s)),
            exec_timeout_s=timeout_s,
            lifetime_s=timeout_s + _AROUND_S + _STARTS_S,
        )
        run = _Run(task, recipe, backend, limits, timeout_s, self.max_state_bytes)
        async with self._slots:
            grade, is_supervised = await run.grade(files)
            if grade.score and not is_supervised and await self._is_supervised(run):
                return _grade(0.0, "pytest did not run under its supervisor, as on the base state it does")
            return grade

    async def _is_supervised(self, run: _Run) -> bool:
        """Whether the command runs pytest under its supervisor on the base state; then a solution's must, too."""
        digest = hashlib.sha256(repr((run.recipe, run.task.image)).encode())
        for files in (run.task.files, run.task.hidden_tests):
            for path, content in sorted(files.items()):
                digest.update(f"{len(content)}:{path}\0".encode(errors="surrogateescape") + content)
        key = digest.digest()
        if key not in self._supervised:
            while len(self._supervised) >= _MAX_REMEMBERED:
                del self._supervised[next(iter(self._supervised))]
            self._supervised[key] = (await run.again().on(None))[1]
        return self._supervised[key]


@dataclass(frozen=True)
class _Run:
    """One grading."""

    task: Task
    recipe: Recipe
    backend: SandboxBackend
    limits: SandboxLimits
    timeout_s: float
    max_state_bytes: int
    # Names and words that nothing which the agent left behind can know.
    plugin: str = field(default_factory=lambda: f"_report_{secrets.token_hex(8)}")
    folder: str = field(default_factory=lambda: f"/tmp/{secrets.token_hex(16)}")
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())

    def again(self) -> _Run:
        """The same with names and words of its own."""
        return dataclasses.replace(self, plugin=f"{self.plugin}_", nonce=secrets.token_hex(16).encode())

    async def grade(self, final: Mapping[str, bytes]) -> tuple[Grade, bool]:
        """Run the command, read what came of it, and say who is to blame where nothing did.

        Returns:
            The grade, and whether pytest's supervisor has begun.
        """
        try:
            grade, is_supervised = await self.on(final)
        except DoesNotFitError as error:
            return _grade(0.0, str(error)), False
        if grade is not None:
            return grade, is_supervised
        # "No such command": the solution's own doing if the base state knows the command.
        if (await self.again().on(None))[0] is None:
            raise GradingError(
                f"The image of task {self.task.id} lacks what its tests are run with: "
                f"{self.recipe.command!r:.200} ends with {_NO_SUCH_COMMAND} on its base state."
            )
        return _grade(0.0, f"the command ended with {_NO_SUCH_COMMAND}, as on the base state it does not"), False

    async def on(self, final: Mapping[str, bytes] | None) -> tuple[Grade | None, bool]:
        """The grade of a state (None: of the base state), or None if there is no such command; as `grade` has it."""
        task = self.task
        base: Mapping[str, bytes] = task.files
        if not task.image:
            state = self._state(base, base if final is None else final)
            sandbox = await self.backend.start(state, self.limits)
        else:
            sandbox = await self.backend.start(task.files, self.limits, image=task.image)
        work_s = self.timeout_s + _AROUND_S
        try:
            async with asyncio.timeout(work_s):
                if task.image:
                    base = await self._base_of(sandbox)
                    await bring_to(sandbox, base, self._state(base, base if final is None else final), task.id)
                for path, content in self._beside(base, sandbox.workdir).items():
                    await put(sandbox, path, content, task.id)
                return await self._run(sandbox)
        except TimeoutError:
            raise GradingError(f"The grading sandbox of task {task.id} did not end within {work_s:g} s.") from None
        finally:
            await asyncio.shield(asyncio.ensure_future(sandbox.stop()))

    def _hidden(self) -> dict[str, bytes]:
        return {path: content for path, content in self.task.hidden_tests.items() if path != self.recipe.patch}

    def _beside(self, base: Mapping[str, bytes], workdir: str) -> dict[str, bytes]:
        """What goes elsewhere than into the working directory: path -> content."""
        files = {f"{self.folder}/{self.plugin}{end}": content for end, content in _PLUGIN.items()}
        task, _ = self._placed(base)
        hidden = {posixpath.join(self.recipe.hidden_folder, path): content for path, content in self._hidden().items()}
        digests = {
            posixpath.join(workdir, path): hashlib.sha256(content).hexdigest()
            for path, content in (test_files(task, **self._rules()) | hidden).items()
            if path.endswith(".py")
        }
        files[f"{self.folder}/{self.plugin}{TESTS}"] = json.dumps(digests).encode()
        if folder := self.recipe.hidden_folder:
            hidden = self._hidden()
            if CONFIG_FILES.isdisjoint(hidden):
                # pytest would look for its configuration in the working directory, where it is the agent's.
                hidden["pytest.ini"] = b"[pytest]\n"
            files |= {posixpath.join(folder, path): content for path, content in hidden.items()}
        return files

    def _rules(self) -> dict[str, Any]:
        """Arguments of `clean_state`."""
        recipe = self.recipe
        return {
            "restored": recipe.restored,
            "kept": recipe.kept,
            "tests": recipe.restores_tests,
            "command": recipe.command,
        }

    def _placed(self, base: Mapping[str, bytes]) -> tuple[Task, list[str]]:
        """The task with the files of its tests where they belong, and which of its files its patch takes away."""
        hidden = {} if self.recipe.hidden_folder else self._hidden()
        gone: list[str] = []
        if self.recipe.patch:
            try:
                changed = apply_diff(self.task.hidden_tests[self.recipe.patch], base)
            except ValueError as error:
                raise TaskError(f"The patch of the tests of task {self.task.id} cannot be applied: {error}.") from None
            hidden |= {path: content for path, content in changed.items() if content is not None}
            gone = [path for path, content in changed.items() if content is None]
        return dataclasses.replace(self.task, files=dict(base), hidden_tests=hidden), gone

    def _state(self, base: Mapping[str, bytes], final: Mapping[str, bytes]) -> dict[str, bytes]:
        """The working directory to grade: the agent's, with the tests' own files."""
        task, gone = self._placed(base)
        state = clean_state(task, final, **self._rules())
        state = {path: content for path, content in state.items() if path not in gone}
        if reason := does_not_fit(task, state, self.limits):
            raise DoesNotFitError(reason)
        return state

    async def _base_of(self, sandbox: Sandbox) -> dict[str, bytes]:
        try:
            return await sandbox.files(self.max_state_bytes)
        except OSError as error:
            raise GradingError(
                f"The files of image {self.task.image} of task {self.task.id} cannot be collected "
                f"({error.strerror or error}): raise max_state_bytes={self.max_state_bytes}, or use a smaller image."
            ) from None

    async def _run(self, sandbox: Sandbox) -> tuple[Grade | None, bool]:
        recipe = self.recipe
        # A name that nothing which the agent left behind can know.
        report_path = recipe.report_path or f"/tmp/report-{secrets.token_hex(16)}.xml"
        command = recipe.command.replace("{report}", shlex.quote(report_path))
        command = _SUPERVISED.format(folder=self.folder, plugin=self.plugin) + command
        # A program that reads its input without being asked would take the nonce for it.
        nonce = b"" if recipe.report == "exit_code" else self.nonce
        result = await sandbox.exec(["sh", "-c", command], stdin=nonce, timeout_s=self.timeout_s)
        return await self._read(sandbox, result, report_path), _READY in result.output

    async def _read(self, sandbox: Sandbox, result: ExecResult, report_path: str) -> Grade | None:
        recipe = self.recipe
        if result.timed_out:
            return _grade(0.0, f"the tests did not end within {self.timeout_s:g} s", result)
        if result.exit_code == _NO_SUCH_COMMAND:
            return None
        if recipe.report == "exit_code":
            return _grade(float(result.exit_code == 0), f"the command failed: {_shown(result)}", result)
        report = self._supervised(result)
        if recipe.report == "reward":
            return await self._reward(sandbox, report_path, result, report)
        required = [*recipe.fail_to_pass, *recipe.pass_to_pass]
        try:
            if report is not None:
                found = {str(name): bool(passed) for name, passed in report["found"].items()}
                if not found and report["problem"]:
                    return _grade(0.0, f"{report['problem']}: {_shown(result)}", result)
            elif recipe.report == "junit":
                found = read_junit(await sandbox.read(report_path, _MAX_REPORT_BYTES))
                required = list(map(junit_name, required))
            elif result.truncated:
                raise ValueError(f"more than {self.limits.output_bytes} bytes were printed")
            else:
                found = read_summary(result.output)
        except (OSError, ValueError) as error:
            reason = f"there is no report of the tests ({getattr(error, 'strerror', None) or error}): {_shown(result)}"
            return _grade(0.0, reason, result)
        return _verdict(found, required, result)

    def _supervised(self, result: ExecResult) -> dict[str, Any] | None:
        """What pytest's supervisor says; None if no pytest has run under one.

        Without a report after a supervisor has begun, nothing has passed: whoever ended it is to blame.
        """
        _, found, report = result.output.rpartition(b"\n" + self.nonce)
        if found:
            try:
                return json.JSONDecoder().raw_decode(report.decode(errors="replace"))[0]
            except ValueError:
                return {"found": {}, "problem": "the report of the tests is cut"}
        if _READY in result.output:
            return {"found": {}, "problem": "pytest's process was killed before it had reported"}
        return None

    async def _reward(self, sandbox: Sandbox, path: str, result: ExecResult, report: Mapping[str, Any] | None) -> Grade:
        """What was written to the file, or to the .json of its name; in full only if pytest, where it ran, agrees."""
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
        if score == 1.0 and report is not None and (report["problem"] or not all(report["found"].values())):
            failed = next((name for name, passed in report["found"].items() if not passed), "")
            reason = f"a reward of 1 was written to {path} beside tests that did not pass"
            return _grade(0.0, f"{reason}: {report['problem'] or failed}", result)
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


def _grade(score: float, reason: str, result: ExecResult = _NOTHING_RAN, **numbers: int) -> Grade:
    return Grade(score, {"reason": "" if score == 1.0 else reason, "seconds": result.seconds, **numbers})


def _shown(result: ExecResult) -> str:
    output = _REPORT.sub(b"", result.output.replace(_READY + b"\n", b""))
    said = " ".join(output[-300:].decode(errors="replace").split()) or "no output"
    return f"exit code {result.exit_code}: {said}"
