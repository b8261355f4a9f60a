"""Grader `pytest`: hidden tests decide, in a clean sandbox that the agent never saw.

Tests reach the solution in one of two ways, and what a 1.0 is worth depends on it:

Apart: tests that import `composer_solution` call the solution through it (`call("main.add_price", 2, 3)`). They run in
a sandbox without a file of the agent's; the solution runs in a second one without a test; what passes between them is
JSON. All that the agent's code can do is to answer. So a 1.0 says that it answered all calls rightly. It may still
have been written for these very calls if the agent could guess them.

Together: other tests import the solution, which so runs in their process. What holds: it starts from a clean state;
tests and their configuration are the task's; the process that reports to us is closed to the one that runs the
solution; ending early, printing a verdict, skipping tests, reading their files and objects that equal everything do
not work. What does not hold: code that is written to look for pytest's or the tests' objects in memory can read what
is expected or forge results. Use it for solutions that are honest, or of too many kinds for JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

from composer.contract import ExecResult, Grade, Sandbox, SandboxBackend, SandboxLimits
from composer.errors import GradingError, TaskError
from composer.types import Task, Trajectory
from envs.grading.clean_state import CONFIG_FILES, clean_state, does_not_fit, test_files
from envs.grading.hidden_tests import PROXY, expected_tests, runs_apart, test_paths
from envs.grading.several import several

_HERE = Path(__file__).parent
REPORTER = _HERE / "reporter.py"
CLIENT, SERVER = _HERE / "composer_solution.py", _HERE / "solution_server.py"
READY = b"composer-grading-ready"
AWAITED, GREETED = b"composer-solution-awaited", b"composer-solution-greeted"
NONCE = "COMPOSER_GRADING_NONCE"
ARGUMENTS = ("--assert=plain", "--capture=no", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler")
"""Nothing that tests could ask for is off; failures are shown by `reporter.py`, so no output is made or captured."""
CANARY = b"""\
def check(found, expected):
    assert found == expected, "canary"


def {name}():
    check(1, 2)
"""
"""The test that must fail where tests and solution share a process."""
_AROUND_S = 60.0
"""Of a run, for all but the tests."""
_STARTS_S = 120.0
"""Of a sandbox's life, until the last sandbox of its run has started too."""
_LAST_WORDS_S = 2.0
"""For the solution's process to be seen to have ended."""


@dataclass
class _Memory:
    """Verdicts of one backend by content, oldest use first, and those being made now."""

    verdicts: OrderedDict[bytes, Grade] = field(default_factory=OrderedDict)
    running: dict[bytes, asyncio.Task[tuple[Grade, bool]]] = field(default_factory=dict)
    waiting: dict[bytes, int] = field(default_factory=dict)


class PytestGrader:
    """1.0 if every hidden test ran and passed, else 0.0.

    A verdict is a function of the files that go into the grading sandbox, so equal files are graded once per backend
    (`memoise`); requests at the same time share a run. Failures of the machine and tests that ran out of time are
    never remembered.
    """

    name = "pytest"
    bounds_itself = True
    """A run has `work_s` from when its sandboxes are there; before, it queues for one of `concurrency` places."""

    def __init__(
        self,
        timeout_s: float = 20.0,
        memory_bytes: int = 512 * 2**20,
        concurrency: int = 4,
        memoise: bool = True,
        max_verdicts: int = 8192,
    ) -> None:
        """Choose what a run of the tests may use.

        Args:
            timeout_s: wall time of the tests, in seconds; tests that take longer have failed. A task may name its own
                in `metadata["timeout_s"]`.
            memory_bytes: memory of a grading sandbox.
            concurrency: gradings at a time; each has a sandbox, or two (see this module's first lines).
            memoise: grade equal files once.
            max_verdicts: how many verdicts are remembered.

        Raises:
            ValueError: a value is too small.
        """
        for name, value, least in (
            ("timeout_s", timeout_s, 0.1),
            ("memory_bytes", memory_bytes, 32 * 2**20),
            ("concurrency", concurrency, 1),
            ("max_verdicts", max_verdicts, 1),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, but is {value} instead")
        self.timeout_s = timeout_s
        disk_bytes = min(SandboxLimits.disk_bytes, memory_bytes // 2)
        limits = SandboxLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes, output_bytes=2**20)
        self.limits = _for_so_long(limits, timeout_s)
        self.memoise, self.max_verdicts = memoise, max_verdicts
        self.num_runs = 0
        """How often pytest really ran."""
        self._slots = asyncio.Semaphore(concurrency)
        self._memories: WeakKeyDictionary[SandboxBackend, _Memory] = WeakKeyDictionary()

    def doubt(self, task: Task) -> str:
        """What in the grading of a task is within reach of the agent's code; see `composer.contract.Grader`.

        Raises:
            TaskError: a hidden test is no Python.
        """
        if runs_apart(task):
            return ""
        return f"its hidden tests import the solution: code in their process can forge; let them import {PROXY}"

    async def grade(
        self, task: Task, files: Mapping[str, bytes], backend: SandboxBackend, trajectory: Trajectory | None = None
    ) -> Grade:
        """Run the hidden tests on what the agent left behind.

        Args:
            task: base state and hidden tests.
            files: the final state of the agent's sandbox.
            backend: starts the grading sandboxes.
            trajectory: not looked at.

        Raises:
            SandboxError: the grading sandbox failed.
            GradingError: pytest could not start in it, or its report is cut, or its sandbox hangs.
            TaskError: the hidden tests hold no test, are no Python, or cannot be loaded apart from the solution.
        """
        expected = expected_tests(task)
        state = clean_state(task, files)
        if reason := does_not_fit(task, state, self.limits):
            return Grade(0.0, {"reason": reason, "num_passed": 0, "num_expected": len(expected), "seconds": 0.0})
        if not self.memoise:
            return (await self._run(task, state, expected, backend))[0]
        memory = self._memories.setdefault(backend, _Memory())
        key = _content_hash(state, expected, task.image)
        if key in memory.verdicts:
            memory.verdicts.move_to_end(key)
            return memory.verdicts[key]
        if key not in memory.running:
            memory.running[key] = asyncio.create_task(self._run(task, state, expected, backend))
            memory.waiting[key] = 0
        run = memory.running[key]
        memory.waiting[key] += 1
        try:
            grade, is_pure = await asyncio.shield(run)
        finally:
            memory.waiting[key] -= 1
            if memory.waiting[key] == 0:  # the last one to leave, also when all were cancelled
                run.cancel()
                del memory.running[key], memory.waiting[key]
        if is_pure:
            memory.verdicts[key] = grade
            while len(memory.verdicts) > self.max_verdicts:
                memory.verdicts.popitem(last=False)
        return grade

    async def check(self, task: Task, reference: Mapping[str, bytes] | None, backend: SandboxBackend) -> None:
        """Make sure that the hidden tests fail on the base state and pass on a right solution.

        Args:
            task: the task.
            reference: files of a right solution; None if there is none to try.
            backend: starts the grading sandboxes.

        Raises:
            TaskError: they do not.
            SandboxError, GradingError: as of `grade`.
        """
        if (await self.grade(task, task.files, backend)).score != 0.0:
            raise TaskError(
                f"The hidden tests of task {task.id} pass on its base state, so there is nothing to do: "
                "break its `files`, or make its `hidden_tests` tell right from wrong."
            )
        if reference is not None and (right := await self.grade(task, reference, backend)).score != 1.0:
            raise TaskError(
                f"The hidden tests of task {task.id} fail on its reference: {right.details['reason']}; "
                "mend the reference or the tests."
            )

    async def _run(
        self, task: Task, state: dict[str, bytes], expected: set[str], backend: SandboxBackend
    ) -> tuple[Grade, bool]:
        """One verdict in fresh sandboxes, and whether it would be the same again."""
        timeout_s, limits = self.timeout_s, self.limits
        if "timeout_s" in task.metadata:
            timeout_s = float(task.metadata["timeout_s"])
            limits = _for_so_long(limits, timeout_s)
        run = _Run(task, backend, limits, timeout_s)
        async with self._slots:
            self.num_runs += 1
            try:
                report = await (run.apart(state) if runs_apart(task) else run.together(state))
            except TimeoutError:
                raise GradingError(
                    f"The grading sandbox of task {task.id} did not end within {run.work_s:g} s."
                ) from None
        return _verdict(task, report, expected, timeout_s), not report.result.timed_out


def _for_so_long(limits: SandboxLimits, timeout_s: float) -> SandboxLimits:
    """The limits of sandboxes in which tests may run for `timeout_s`."""
    lifetime_s = timeout_s + _AROUND_S + _STARTS_S
    return replace(limits, cpu_seconds=max(1, round(timeout_s)), exec_timeout_s=timeout_s, lifetime_s=lifetime_s)


@dataclass(frozen=True)
class _Report:
    """What came out of one run of the tests."""

    result: ExecResult
    events: list[dict[str, Any]] | None
    """What reporter.py saw; None if there is no genuine report."""
    solution: str = ""
    """Why the solution's process did not answer all calls, if it runs apart."""

    canary: str = ""
    """Node id of the test that must fail, if one was to run."""

    def of(self, when: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events or () if event["when"] == when]


@dataclass(frozen=True)
class _Run:
    """One run of a task's hidden tests."""

    task: Task
    backend: SandboxBackend
    limits: SandboxLimits
    timeout_s: float
    # Names that nothing which the agent left behind can have.
    plugin: str = field(default_factory=lambda: f"_report_{secrets.token_hex(8)}")
    server: str = field(default_factory=lambda: f"composer_serve_{secrets.token_hex(8)}")
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())

    def _sandboxes(self, *states: Mapping[str, bytes]) -> AbstractAsyncContextManager[list[Sandbox]]:
        return several(self.backend, states, self.limits, self.task.image, self.work_s)

    @property
    def work_s(self) -> float:
        """Wall time of the run from when its sandboxes are there: the wait for them is nobody's fault."""
        return self.timeout_s + _AROUND_S

    async def together(self, state: Mapping[str, bytes]) -> _Report:
        """Run the tests on the solution in one process."""
        command, files, environment = self._pytest(state)
        # Its name shows nothing, and is in no sandbox twice.
        name = f"test_{secrets.token_hex(8)}"
        files[f"{name}.py"] = CANARY.replace(b"{name}", name.encode())
        async with self._sandboxes(files) as [sandbox]:
            result = await sandbox.exec(
                [*command, f"{name}.py"], stdin=self.nonce, env=environment, timeout_s=self.timeout_s
            )
        return replace(self._read(result), canary=f"{name}.py::{name}")

    async def apart(self, state: Mapping[str, bytes]) -> _Report:
        """Run the tests in one sandbox and the solution in another."""
        command, files, environment = self._pytest(test_files(self.task))
        files[f"{PROXY}.py"] = CLIENT.read_bytes()
        environment[NONCE] = self.nonce.decode()
        solution = {path: content for path, content in state.items() if path not in self.task.hidden_tests}
        solution[f"{self.server}.py"] = SERVER.read_bytes()
        serve = ["python3", "-m", self.server]
        async with self._sandboxes(files, solution) as [tests, other]:
            ours, theirs = socket.socketpair()
            serving = asyncio.ensure_future(other.exec(serve, channel=theirs, timeout_s=self.timeout_s))
            try:
                result = await tests.exec(command, channel=ours, env=environment, timeout_s=self.timeout_s)
                report = self._read(result)
                if result.timed_out and AWAITED in result.output and GREETED not in result.output:
                    await self._last_words(serving, f"it had not started after {self.timeout_s:g} s", True)
                for end in report.of("solution"):
                    if end["trouble"]:
                        trouble = await self._last_words(serving, end["trouble"], end["never_started"])
                        report = _Report(result, report.events, trouble)
                    elif end["num_calls"] == 0:
                        self._blame_tests(report)
            finally:
                serving.cancel()
                await asyncio.wait([serving])
        return report

    def _pytest(self, state: Mapping[str, bytes]) -> tuple[list[str], dict[str, bytes], dict[str, str]]:
        """Command, files and environment of the process that runs the tests."""
        # No variable that starts with PYTHON: a sandbox may keep a warm interpreter for exactly this command.
        command = ["python3", "-m", "pytest", "-p", self.plugin, *ARGUMENTS]
        files = {**state, f"{self.plugin}.py": REPORTER.read_bytes()}
        if all(PurePosixPath(path).name not in CONFIG_FILES for path in state):
            # The task brings no configuration: with one of ours, pytest looks for no other, under whatever name.
            command += ["-c", f"{self.plugin}.ini"]
            files[f"{self.plugin}.ini"] = b"[pytest]\n"
        command += test_paths(self.task)
        return command, files, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}

    def _read(self, result: ExecResult) -> _Report:
        """Find the report in what was printed; without one after a good start, the code under test is to blame."""
        if READY not in result.output:
            raise GradingError(
                f"pytest could not start in the grading sandbox of task {self.task.id} "
                f"({_shown(result.exit_code, result.output)}): the sandbox needs python3 with pytest."
            )
        _, found, report = result.output.rpartition(b"\n" + self.nonce)
        if not found:
            return _Report(result, None)
        try:
            return _Report(result, json.loads(report))
        except ValueError:
            raise GradingError(
                f"The report of task {self.task.id} is cut: its hidden tests are too many for one run."
            ) from None

    async def _last_words(self, serving: asyncio.Future[ExecResult], trouble: str, never_started: bool) -> str:
        """Why the solution did not answer; a sandbox that failed comes out as its error."""
        await asyncio.wait([serving], timeout=_LAST_WORDS_S)
        ended = serving.result() if serving.done() else None
        if never_started:  # too late or not at all: nothing of the agent's has run in it
            raise GradingError(
                f"The solution's process could not start in the grading sandbox of task {self.task.id} "
                f"({_shown(ended.exit_code, ended.output) if ended and not ended.timed_out else trouble}): "
                "the sandbox needs python3, and the machine time to start it."
            )
        return f"{trouble} (exit code {ended.exit_code})" if ended else trouble

    def _blame_tests(self, report: _Report) -> None:
        """Nothing of the solution's was called: whatever keeps the tests from running is their own."""
        for event in report.of("collect"):
            raise TaskError(
                f"The hidden test {event['id']} of task {self.task.id} cannot be loaded: {event['message']}; tests "
                f"that import {PROXY} run without the solution's files and reach it only by `{PROXY}.call`."
            )
        if not report.of("end"):
            said = report.result.output.partition(READY)[2].rpartition(b"\n" + self.nonce)[0]
            raise TaskError(
                f"The hidden tests of task {self.task.id} ended before the first of them ran "
                f"({_shown(report.result.exit_code, said)}): mend them, or their conftest.py."
            )


def _verdict(task: Task, report: _Report, expected: set[str], timeout_s: float) -> Grade:
    """1.0 if the report leaves no doubt."""
    events, result = report.events, report.result
    tests = [event for event in events or () if event["when"] in ("collect", "setup", "call", "teardown")]
    canary = [(e["when"], e["outcome"]) for e in tests if report.canary and e["id"].endswith(report.canary)]
    tests = [e for e in tests if not report.canary or not e["id"].endswith(report.canary)]
    passed = {e["id"] for e in tests if e["when"] == "call" and e["outcome"] == "passed"}
    passed -= {e["id"] for e in tests if e["outcome"] != "passed"}
    bad = next((e for e in tests if e["outcome"] != "passed"), None)
    collected = {i for event in report.of("collected") for i in event["ids"] if not i.endswith(report.canary or "\0")}
    missing = (expected - {node_id.split("[", 1)[0] for node_id in passed}) | (collected - passed)
    reason = ""
    if result.timed_out:
        reason = f"the tests did not end within {timeout_s:g} s"
    elif events is None:
        reason = f"the process that ran the tests was killed (exit code {result.exit_code})"
    elif report.solution:
        reason = f"the solution was lost: {report.solution}"
    elif bad is not None:
        reason = f"{bad['id']}: {bad['outcome']} in {bad['when']}: {bad['message']}"
    elif not report.of("end"):
        reason = "the process ended before the tests did"
    elif missing:
        reason = f"{len(missing)} of the tests did not run, {min(missing)} among them"
    elif report.canary and ("call", "failed") not in canary:
        reason = "a test that must fail did not, so the results are forged"
    details = {"reason": reason, "num_passed": len(passed), "num_expected": len(expected), "seconds": result.seconds}
    return Grade(0.0 if reason else 1.0, details)


def _shown(exit_code: int, output: bytes) -> str:
    shown = " ".join(output[-300:].decode(errors="replace").split()) or "no output"
    return f"exit code {exit_code}: {shown}"


def _content_hash(state: Mapping[str, bytes], expected: set[str], image: str) -> bytes:
    digest = hashlib.sha256(f"{image}\0".encode(errors="replace"))
    for path in sorted(state):
        for part in (path.encode(errors="surrogateescape"), state[path]):
            digest.update(len(part).to_bytes(8, "big") + part)
    digest.update(repr(sorted(expected)).encode(errors="replace"))
    return digest.digest()
