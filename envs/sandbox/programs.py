"""Running one program inside a sandbox: its output, its deadline, its end. Runs in the supervisor.

The supervisor is outside the sandbox's PID namespace: its children are inside, it is not. So programs there can
neither see it, nor signal it, nor read its memory, and exit codes come from `waitpid` or from a pipe that they do not
hold.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.sandbox.frames import Body
from envs.sandbox.limits import WATCH_INTERVAL_S, MemoryWatch
from envs.waiting import ready

IGNORED = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that a supervisor ignores. All others are as the kernel has them, and so for its children."""
CHUNK = 2**16
"""Bytes of one read or write."""
_FREE_READS = 2**22
"""Bytes of one command's output that are read at full speed. Endless writers then wait for the supervisor."""
GRACE_S = 2.0
"""For processes to end after SIGKILL."""
_SACRIFICED = b"500"
TIMED_OUT = 124
"""Exit code of a command that was killed at its deadline, as timeout(1) says it."""


class OutputBuffer:
    """Keeps the first and the last half of `cap` bytes; the middle is dropped.

    Example:
        >>> buffer = OutputBuffer(4)
        >>> buffer.add(b"abc"), buffer.add(b"defg")
        (None, None)
        >>> buffer.value(), buffer.truncated
        (b'abfg', True)
    """

    def __init__(self, cap: int) -> None:
        """`cap` in bytes."""
        self._head, self._tail = bytearray(), bytearray()
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        """Take in what was written."""
        self.num_bytes += len(data)
        free = self._head_cap - len(self._head)
        self._head += data[:free]
        self._tail += data[max(free, 0) :]
        if len(self._tail) > 2 * self._tail_cap + CHUNK:
            del self._tail[: len(self._tail) - self._tail_cap]

    @property
    def truncated(self) -> bool:
        """Whether something was dropped."""
        return self.num_bytes > self._head_cap + self._tail_cap

    def value(self) -> bytes:
        """What is kept."""
        return bytes(self._head + (self._tail[-self._tail_cap :] if self._tail_cap else b""))


@dataclass(frozen=True)
class Result:
    """The end of a command; see `composer.contract.ExecResult`."""

    exit_code: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class Inside:
    """What the supervisor knows of its sandbox."""

    workdir: str
    environment: dict[str, str]
    bound: Callable[[int], None]
    """Applies the resource limits to a new child, before it runs anything of others; 0: the caller is it."""
    members: Callable[[], set[int]]
    """All processes of the sandbox, in this process's PID namespace."""
    score: int
    """Descriptor of this process's oom_score_adj (proc_pid_oom_score_adj(5))."""
    init_pid: int = 1
    """PID 1 of the sandbox, in this process's PID namespace."""
    memory: MemoryWatch | None = None
    """Looks at the memory, where the kernel does not see to that."""


def start_child(inside: Inside, start: Callable[[], int]) -> int:
    """The child that `start` makes: when memory runs out, the kernel takes it and what comes of it, and not us.

    Raises:
        OSError: from `start`.
    """
    usual = os.pread(inside.score, 32, 0)
    os.pwrite(inside.score, _SACRIFICED, 0)
    pid = -1
    try:
        pid = start()
    finally:
        if pid:  # not in a child
            os.pwrite(inside.score, usual, 0)
    return pid


def spawn(
    inside: Inside, run: Callable[[], None], stdin: int, output: int, directory: str, stdout: int | None = None
) -> int:
    """Fork a child in the sandbox, in a session of its own, that calls `run` and exits.

    Args:
        inside: the sandbox.
        run: executes a program or does not return; an `OSError` from it is printed as a shell would.
        stdin: file descriptor that becomes 0.
        output: file descriptor that becomes 1 and 2.
        directory: where the child starts.
        stdout: file descriptor that becomes 1 instead.

    Raises:
        OSError: no more processes may be made.
    """
    pid = start_child(inside, os.fork)
    if pid:
        return pid
    code = 127
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(output if stdout is None else stdout, 1)
        os.dup2(output, 2)
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        # Until `run` has let go of them, this process of the sandbox's own user holds the supervisor's descriptors: it
        # stays one that nobody may look into (/proc/<pid>/fd). execve(2) makes it an ordinary one, after closing them.
        inside.bound(0)
        os.chdir(directory)
        run()
        code = 0
    except OSError as e:
        code = 127 if isinstance(e, FileNotFoundError) else 126
        os.write(2, f"{e.filename or directory}: {e.strerror}\n".encode(errors="surrogateescape"))
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        os._exit(code & 0xFF)


def execute(argv: Sequence[str], environment: dict[str, str]) -> None:
    """Become the program `argv`, looked up in the environment's PATH; on failure raise its `OSError`."""
    try:
        os.execvpe(argv[0], list(argv), environment)
    except OSError as e:
        e.filename = argv[0]
        raise
    except ValueError as e:
        raise OSError(22, str(e), argv[0]) from e


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended, or None."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 128 + signal.SIGKILL
    return _exit_code(status) if done else None


def kill_others(members: Callable[[], set[int]], keep: set[int]) -> None:
    """Kill every process of the sandbox that is not in `keep`, also while it multiplies.

    All are stopped before the first is killed: a process that is stopped does not fork, so the second or third
    look finds nothing new.
    """
    deadline = time.monotonic() + GRACE_S
    stopped: set[int] = set()
    while fresh := members() - keep - stopped:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
        if time.monotonic() > deadline:
            break
    deadline = time.monotonic() + GRACE_S  # of its own: what took long to stop is killed all the same
    while time.monotonic() < deadline and (left := members() - keep):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            reap(pid)
        time.sleep(0.002)


class Watch:
    """Waits for one command: reads its output, looks at the deadline and at the memory."""

    def __init__(self, inside: Inside, output: int, cap: int, timeout_s: float, keep: set[int]) -> None:
        """`output` is read without blocking; past `timeout_s` all processes of the sandbox but `keep` are killed."""
        self._inside, self._output, self._keep = inside, output, keep
        self._buffer = OutputBuffer(cap)
        self._deadline = time.monotonic() + timeout_s
        self.timed_out = False

    def wait(self, ended: int, stdin: tuple[int, bytes] | None = None) -> None:
        """Return when the file descriptor `ended` is readable, or when the command had to be killed."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(ended, select.POLLIN)
        write_fd, data = stdin or (-1, b"")
        if write_fd >= 0:
            poll.register(write_fd, select.POLLOUT)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self.timed_out = True
                kill_others(self._inside.members, self._keep)
                return
            memory = self._inside.memory
            events = dict(poll.poll(1000 * (left if memory is None else min(left, WATCH_INTERVAL_S))))
            if self._output in events and not self._read():
                poll.unregister(self._output)
            if write_fd in events:
                data = self._feed(write_fd, data, events[write_fd])
                if not data:
                    poll.unregister(write_fd)
                    os.close(write_fd)
                    write_fd = -1
            if ended in events:
                break
            if memory is not None and memory.is_over():
                kill_others(self._inside.members, {self._inside.init_pid})
                break
        if write_fd >= 0:
            os.close(write_fd)

    @staticmethod
    def _feed(fd: int, data: bytes, events: int) -> bytes:
        if events & (select.POLLERR | select.POLLHUP):
            return b""
        try:
            return data[os.write(fd, data[:CHUNK]) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""

    def _read(self) -> int:
        """Read once; 0 at the end of the output, and whenever there is none just now."""
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
            return 0
        self._buffer.add(data)
        if self._buffer.num_bytes > _FREE_READS:
            time.sleep(0.001)
        return len(data)

    def result(self, exit_code: int) -> Result:
        """Read what is left in the pipe, which holds no more than 64 KiB, and close the account."""
        end = self._buffer.num_bytes + CHUNK
        while self._buffer.num_bytes < end and self._read():
            pass
        code = TIMED_OUT if self.timed_out else exit_code
        return Result(code, self._buffer.value(), self.timed_out, self._buffer.truncated)


def run_program(
    inside: Inside, run: Callable[[], None], stdin: Body, timeout_s: float, cap: int, channel: int = -1
) -> Result:
    """Run one program to its end. Processes that it leaves behind stay, unless the deadline passed.

    Args:
        inside: the sandbox.
        run: as of `spawn`.
        stdin: what the program can read; it comes out of its pipe, and from nowhere else in its memory.
        timeout_s: at this deadline it is killed with everything that it started.
        cap: bytes of output to keep.
        channel: file descriptor that becomes 0 and 1 instead, if it is not -1; it is closed here.
    """
    keep = inside.members()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    if channel >= 0:
        stdin_read, stdin_write = channel, -1
    else:
        stdin_read, stdin_write = os.pipe2(os.O_CLOEXEC) if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
    try:
        pid = spawn(inside, run, stdin_read, write_end, inside.workdir, channel if channel >= 0 else None)
    except OSError as e:
        for fd in (read_end, write_end, stdin_read, *([stdin_write] if stdin_write >= 0 else ())):
            os.close(fd)
        return Result(126, f"cannot fork: {e.strerror}\n".encode())
    os.close(write_end)
    os.close(stdin_read)
    if stdin_write >= 0:
        os.set_blocking(stdin_write, False)
    ended = os.pidfd_open(pid)
    try:
        watch = Watch(inside, read_end, cap, timeout_s, keep)
        watch.wait(ended, (stdin_write, stdin.read()) if stdin_write >= 0 else None)
        ready(ended, timeout_s=GRACE_S)
        code = reap(pid)
        return watch.result(128 + signal.SIGKILL if code is None else code)
    finally:
        os.close(ended)
        os.close(read_end)
