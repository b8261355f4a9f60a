"""Grader `pytest`: hidden tests decide, in a clean sandbox that the agent never saw.

What it does not protect against: the code under test runs in the process of the tests, so code written to look for
pytest's objects in memory can forge results. Ending the process early, printing a verdict, changing tests or their
configuration, and objects that equal everything do not work.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from weakref import WeakKeyDictionary

from composer.contract import ExecResult, Grade, SandboxBackend, SandboxLimits
from composer.errors import GradingError, TaskError
from composer.types import Task, Trajectory
from envs.grading.clean_state import CONFIG_FILES, clean_state

REPORTER = Path(__file__).with_name("reporter.py")
READY = b"composer-grading-ready"
ARGUMENTS = ("--assert=plain", "--capture=no", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler")
"""Nothing that tests could ask for is off; failures are shown by `reporter.py`, so no output is made or captured."""


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
    """A run has `limits.lifetime_s`; before it, the grader queues for one of `concurrency` places."""

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
            timeout_s: wall time of the tests, in seconds; tests that take longer have failed.
            memory_bytes: memory of the grading sandbox.
            concurrency: grading sandboxes at a time.
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
        self.limits = SandboxLimits(
            memory_bytes=memory_bytes,
            disk_bytes=min(SandboxLimits.disk_bytes, memory_bytes // 2),
            cpu_seconds=max(1, round(timeout_s)),
            exec_timeout_s=timeout_s,
            lifetime_s=timeout_s + 60,
            output_bytes=2**20,
        )
        self.memoise, self.max_verdicts = memoise, max_verdicts
        self.num_runs = 0
        """How often pytest really ran."""
        self._slots = asyncio.Semaphore(concurrency)
        self._memories: WeakKeyDictionary[SandboxBackend, _Memory] = WeakKeyDictionary()

    async def grade(
        self, task: Task, files: Mapping[str, bytes], backend: SandboxBackend, trajectory: Trajectory | None = None
    ) -> Grade:
        """Run the hidden tests on what the agent left behind.

        Args:
            task: base state and hidden tests.
            files: the final state of the agent's sandbox.
            backend: starts the grading sandbox.
            trajectory: not looked at.

        Raises:
            SandboxError: the grading sandbox failed.
            GradingError: pytest could not start in it, or its report is cut, or its sandbox hangs.
            TaskError: the hidden tests hold no test, or are no Python.
        """
        expected = expected_tests(task)
        state = clean_state(task, files)
        if not self.memoise:
            return (await self._run(task, state, expected, backend))[0]
        memory = self._memories.setdefault(backend, _Memory())
        key = _content_hash(state, expected)
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

    async def check(self, task: Task, reference: Mapping[str, bytes], backend: SandboxBackend) -> None:
        """Make sure that the hidden tests pass on a right solution and fail on the base state.

        Raises:
            TaskError: they do not.
            SandboxError, GradingError: as of `grade`.
        """
        right, base = await self.grade(task, reference, backend), await self.grade(task, task.files, backend)
        if right.score != 1.0:
            raise TaskError(f"The hidden tests of task {task.id} fail on its reference: {right.details['reason']}.")
        if base.score != 0.0:
            raise TaskError(f"The hidden tests of task {task.id} pass on its base state: there is nothing to do.")

    async def _run(
        self, task: Task, state: dict[str, bytes], expected: set[str], backend: SandboxBackend
    ) -> tuple[Grade, bool]:
        """One verdict in one sandbox, and whether it would be the same again."""
        plugin, nonce = f"_report_{secrets.token_hex(8)}", secrets.token_hex(16).encode()
        # No variable that starts with PYTHON: a sandbox may keep a warm interpreter for exactly this command.
        command = ["python3", "-m", "pytest", "-p", plugin, *ARGUMENTS]
        files = {**state, f"{plugin}.py": REPORTER.read_bytes()}
        if all(PurePosixPath(path).name not in CONFIG_FILES for path in state):
            # The task brings no configuration: with one of ours, pytest looks for no other, under whatever name.
            command += ["-c", f"{plugin}.ini"]
            files[f"{plugin}.ini"] = b"[pytest]\n"
        command += sorted(task.hidden_tests)
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
        async with self._slots:
            self.num_runs += 1
            try:
                async with asyncio.timeout(self.limits.lifetime_s):
                    sandbox = await backend.start(files, self.limits)
                    try:
                        result = await sandbox.exec(command, stdin=nonce, env=environment, timeout_s=self.timeout_s)
                    finally:
                        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
            except TimeoutError:
                raise GradingError(
                    f"The grading sandbox of task {task.id} did not end within {self.limits.lifetime_s:g} s."
                ) from None
        return _verdict(task, result, nonce, expected, self.timeout_s), not result.timed_out


def expected_tests(task: Task) -> set[str]:
    """Node ids, without parameters, of all test functions in the hidden tests.

    Raises:
        TaskError: there is none, or a file is no Python.
    """
    names: set[str] = set()
    for path, content in task.hidden_tests.items():
        if not path.endswith(".py"):
            continue
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError) as error:
            raise TaskError(f"The hidden test {path} of task {task.id} is no Python: {error}.") from None
        names |= {f"{path}::{name}" for name in _test_names(tree)}
    if not names:
        raise TaskError(f"The hidden tests of task {task.id} hold no test function: {', '.join(task.hidden_tests)}.")
    return names


def _test_names(tree: ast.Module | ast.ClassDef) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and (
            node.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in node.bases)
        ):
            names |= {f"{node.name}::{name}" for name in _test_names(node)}
    return names


def _verdict(task: Task, result: ExecResult, nonce: bytes, expected: set[str], timeout_s: float) -> Grade:
    """Read the supervisor's report; without one after a good start, the code under test is to blame."""

    def failed(reason: str, num_passed: int = 0) -> Grade:
        details = {"reason": reason, "num_passed": num_passed, "num_expected": len(expected)}
        return Grade(0.0, {**details, "seconds": result.seconds})

    if READY not in result.output:
        shown = result.output[-300:].decode(errors="replace").strip() or "no output"
        raise GradingError(
            f"pytest could not start in the grading sandbox of task {task.id} (exit code {result.exit_code}: {shown}): "
            "the sandbox needs python3 with pytest."
        )
    if result.timed_out:
        return failed(f"the tests did not end within {timeout_s:g} s")
    _, found, report = result.output.rpartition(b"\n" + nonce)
    if not found:
        return failed(f"the process that ran the tests was killed (exit code {result.exit_code})")
    try:
        events = json.loads(report)
    except ValueError:
        raise GradingError(f"The report of task {task.id} is cut: its hidden tests are too many for one run.") from None
    bad = next((e for e in events if e["when"] != "end" and e["outcome"] != "passed"), None)
    passed = {e["id"] for e in events if e["when"] == "call" and e["outcome"] == "passed"}
    passed -= {e["id"] for e in events if e["when"] != "end" and e["outcome"] != "passed"}
    missing = expected - {node_id.split("[", 1)[0] for node_id in passed}
    if bad is not None:
        return failed(f"{bad['id']}: {bad['outcome']} in {bad['when']}: {bad['message']}", len(passed))
    if not any(e["when"] == "end" for e in events):
        return failed("the process ended before the tests did", len(passed))
    if missing:
        return failed(f"{len(missing)} of the tests did not run, {min(missing)} among them", len(passed))
    return Grade(
        1.0, {"reason": "", "num_passed": len(passed), "num_expected": len(expected), "seconds": result.seconds}
    )


def _content_hash(state: Mapping[str, bytes], expected: set[str]) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(state):
        for part in (path.encode(errors="surrogateescape"), state[path]):
            digest.update(len(part).to_bytes(8, "big") + part)
    digest.update(repr(sorted(expected)).encode(errors="replace"))
    return digest.digest()
