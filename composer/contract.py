"""What an env, a sandbox, a tool, a grader and a launcher promise. `envs` and `launchers` keep these promises.

Everything that touches a sandbox is asynchronous, since one process runs many episodes at a time. Every wait inside
an implementation has a deadline and leaves the event loop free. `Raises:` lists are complete: what else comes out is a
bug of the part, which is named; the episode then has no reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any, Protocol, runtime_checkable

from composer.types import Split, Task, ToolCall, Trajectory


@dataclass(frozen=True)
class Finding:
    """One line of a machine check: what was looked at, whether it is there, what it would give, what to do."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


@dataclass(frozen=True)
class ExecResult:
    """The end of one command in a sandbox. `output` is stdout and stderr in the order written, capped; binary-safe."""

    exit_code: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False
    """More was written than the cap allows; the middle was dropped."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SandboxStats:
    """Resources that a sandbox used so far."""

    peak_memory_bytes: int
    cpu_seconds: float
    num_processes: int


@dataclass(frozen=True)
class SandboxLimits:
    """Limits that fail closed: a sandbox in which one of them cannot be applied does not start."""

    memory_bytes: int = 512 * 2**20
    num_processes: int = 64
    file_bytes: int = 64 * 2**20
    """Largest single file a process may write."""
    disk_bytes: int = 256 * 2**20
    """Everything written to the sandbox's own file system, which may lie in memory: at most half of `memory_bytes`."""
    cpu_seconds: int = 60
    """CPU time of any one process."""
    exec_timeout_s: float = 30.0
    """Wall time of one command, if the caller names no other."""
    lifetime_s: float = 600.0
    """Wall time of the whole sandbox from before it starts; it is killed afterwards whoever forgot it."""
    output_bytes: int = 64 * 2**10
    """Kept of one command's output."""
    network: bool = False
    """Whether it may ask the network for what its backend allows agents. A backend that allows nothing has none."""
    packages_before: str = ""
    """A date (ISO 8601): package indexes are to look as they did before it. Empty: the backend's own."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a sandbox at one moment, kept by the backend that made it until it is dropped or closed."""

    id: str
    """Unique in its backend."""
    image: str = ""
    """What the sandbox had started from."""


class Sandbox(Protocol):
    """One isolated machine, running. Safe for use by one episode at a time."""

    id: str
    workdir: str
    """Absolute path inside the sandbox in which commands start and relative paths are resolved."""

    async def shell(self, command: str, timeout_s: float | None = None) -> ExecResult:
        """Run a command line in the persistent shell: `cd` and variables last.

        A command that outlives its deadline is killed with its children, and the result says `timed_out`; if the
        shell died with it, the next call gets a new one and loses variables.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def directory(self) -> str:
        """Where the persistent shell is, or would begin. Nothing runs in it for this.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def enter(self, directory: str) -> None:
        """Have the persistent shell begin in a directory; one that has begun stays where it is.

        Raises:
            FileNotFoundError: there is no such directory.
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        channel: socket | None = None,
    ) -> ExecResult:
        """Run one program, without a shell, in a fresh process in `workdir`.

        Args:
            argv: the program and its arguments.
            stdin: what it can read.
            env: variables on top of the sandbox's own.
            timeout_s: wall time; None: `exec_timeout_s` of the limits.
            channel: a connected stream socket that becomes its standard input and output, in place of `stdin`; only
                standard error is then in the result's `output`. It is closed here when the program has it. The program
                may have two one-way streams instead of one socket: it reads 0 and writes 1.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Read a file (at most `max_bytes` of it) as the sandbox's user.

        Raises:
            FileNotFoundError: no such file.
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not read it.
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, making its folders.

        Raises:
            IsADirectoryError: the path is a directory.
            PermissionError: the sandbox's user may not write it.
            OSError: a limit was hit (ENOSPC, EFBIG).
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def files(self, max_bytes: int = 2**20) -> dict[str, bytes]:
        """Every regular file under `workdir`, path relative to it -> content; symbolic links are not followed.

        Raises:
            OSError: EFBIG: the files add up to more than `max_bytes`, are too many, or lie too deep to be written back.
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Keep the file system as it is now. What runs goes on; what it is writing just then may be half there.

        Raises:
            OSError: ENOSPC, EMFILE: there is no room for another snapshot.
            SandboxError: the sandbox is gone or does not answer.
        """
        ...

    async def fork(self) -> Sandbox:
        """A second sandbox, with the limits of this one, that starts from its files as they are now.

        Nothing that runs is copied. Neither sees what the other writes from then on.

        Raises:
            OSError: ENOSPC, EMFILE: there is no room for another snapshot.
            SandboxError: the sandbox is gone or does not answer.
            SandboxStartError: the second one could not start.
        """
        ...

    async def stats(self) -> SandboxStats:
        """What was used so far.

        Raises:
            SandboxError: the sandbox is gone.
        """
        ...

    async def stop(self) -> None:
        """End every process and remove every trace. Idempotent; raises nothing."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind.

    One whose sandboxes keep their files in memory says `files_in_memory = True`: a config whose `disk_bytes` is more
    than half of `memory_bytes` is then refused by the plan already, and not by every start.

    One whose sandboxes may run elsewhere has `async pressure() -> composer.types.Pressure | None`; None: here.
    """

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> Sandbox:
        """A fresh sandbox, with `files` in its `workdir`.

        Args:
            files: path relative to `workdir` -> content; written over what is there.
            limits: of this sandbox.
            image: what it starts from, as the backend names such things; "": the backend's own.
            base: the state that it starts from, of a sandbox of this backend; its image is then the snapshot's.

        Raises:
            SandboxStartError: it could not start, a limit could not be applied, or there is no such image.
            SnapshotGoneError: there is no such snapshot any more; a kind of `SandboxStartError`.
        """
        ...

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file, which this backend can `load` also in another process: whole or not at all.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        ...

    async def load(self, path: Path) -> Snapshot:
        """A snapshot from a file that `save` wrote. Its content is untrusted: it reaches nothing but sandboxes.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no snapshot of such a backend.
        """
        ...

    async def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Sandboxes that started from it go on. Idempotent; raises nothing."""
        ...

    async def close(self) -> None:
        """Stop every sandbox this backend started. Idempotent; raises nothing."""
        ...

    def check(self) -> list[Finding]:
        """What this machine has and lacks for this backend. Starts and stops one real sandbox; raises nothing."""
        ...

    async def audit(self) -> list[Finding]:
        """What gives a sandbox away to a program in it that looks closely: a finding a tell, `ok` if it does not.

        `required` are the tells by which backends are compared. Starts and stops one real sandbox.

        Raises:
            SandboxStartError: it could not start.
            SandboxError: it failed under the probe.
        """
        ...

    def sweep(self) -> int:
        """Remove what killed runs left behind (processes, cgroups, folders), never a live run's; returns how much."""
        ...


@dataclass(frozen=True)
class ToolResult:
    """What the model sees of a tool call. Errors of the model are results too (`ok` false)."""

    content: str
    ok: bool = True
    ends_episode: bool = False


@runtime_checkable
class Tool(Protocol):
    """A tool as the model knows it.

    One that keeps something for an episode may have `final(sandbox)`, a list of dataclasses that goes into the
    trajectory's metadata under the tool's name when the agent has ended, and `restore(sandbox, items)`, which takes
    that list, as dictionaries, when an interrupted episode goes on in another sandbox. If it has them, `async
    check(sandbox)` is called in a fresh sandbox before a run, and `async begin(sandbox)` before each agent; what is
    missing then is a `ToolError`, and no agent's doing.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Run the tool. Wrong arguments and failing programs are results, not errors.

        Raises:
            SandboxError: the sandbox failed.
            ToolError: something outside of the sandbox that the tool needs failed.
        """
        ...


class Taskset(Protocol):
    """A deterministic, possibly endless sequence of tasks.

    One without a scripted expert says `has_expert = False`. One that ends may have `num_tasks(split, distinct=False) ->
    int | None`, how many tasks a split has (None: no end; `distinct`: each counted once): a plan that needs more is
    then refused.

    A taskset that knows right solutions may have `reference(task) -> dict[str, bytes]`, the files of one: a run is then
    refused before it starts if the graders do not accept it. One whose tasks have their base state in an image may have
    `solver(task) -> tuple[dict[str, bytes], str] | None` instead: files and a shell command that solve a task.
    """

    name: str

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` (>= 0) of a split: the same for ever, and never shared between splits.

        Raises:
            IndexError: the taskset is finite and has no such task.
            TaskError: the task cannot be made.
        """
        ...

    def expert(self, task: Task, seed: int) -> Sequence[ToolCall | Sequence[ToolCall]]:
        """A scripted expert's turns for the task, not always right: each a call, or a list of several at once.

        The last call of all ends the episode.

        Raises:
            TaskError: the taskset has no expert.
        """
        ...


@dataclass(frozen=True)
class Grade:
    """A grader's verdict."""

    score: float
    """In [0, 1]."""
    details: dict[str, Any] = field(default_factory=dict)


class Grader(Protocol):
    """Scores the final state of an episode.

    It has `env.episode_timeout_s` for it, in which the wait for a machine that is pressed does not count. A grader that
    queues by itself, and bounds the work after that, sets `bounds_itself = True` instead: the wait is then no failure.

    A grader may have `async check(task, reference, backend)`, which is asked once a split before a run starts. It
    raises a `TaskError` if the task's untouched files, or those of the `reference` unless it is None, are not graded as
    they have to be. And it may have `doubt(task) -> str`, which `composer tasks check` shows: what in the grading of
    this task is within reach of the agent's code; "": nothing is.
    """

    name: str

    async def grade(
        self, task: Task, files: Mapping[str, bytes], backend: SandboxBackend, trajectory: Trajectory
    ) -> Grade:
        """Score the files that the agent left behind, in a sandbox of the grader's own.

        Raises:
            SandboxError: the grading sandbox failed. The episode then has no reward.
            GradingError: the verdict could not be read.
            TaskError: the task's own tests cannot run.
        """
        ...


class Launcher(Protocol):
    """How a Ray cluster comes to be and how the driver gets there."""

    def start(self) -> str:
        """Bring up or find the cluster; returns the Ray address.

        Raises:
            LauncherError: it could not be started or reached before the deadline.
        """
        ...

    def stop(self) -> None:
        """End what `start` began, and nothing else. Idempotent; raises nothing."""
        ...

    def check(self) -> list[Finding]:
        """What is missing for this launcher on this machine."""
        ...

    def sweep(self) -> int:
        """Remove what killed runs left behind; returns how many things were removed."""
        ...
