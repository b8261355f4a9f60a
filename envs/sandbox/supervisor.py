"""The supervisor of one sandbox: a fork of the launcher that joined the sandbox's namespaces and works there.

What all of them need is done before the fork: each page that a child touches has to be copied.

It has the sandbox's user, control group, file system and seccomp filter, no capability, and no way back. So whatever
path it is asked to open is resolved by the kernel inside the sandbox, with the sandbox user's rights and limits:
there is no host path that a symbolic link could lead to. Only its PID namespace is the fork server's (see programs.py).
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from envs.sandbox import frames, limits, linux, trees, warm
from envs.sandbox.programs import Inside, Result, execute, kill_others, run_program
from envs.sandbox.rootfs import Rootfs
from envs.sandbox.seccomp import build_filter
from envs.sandbox.shell import PersistentShell
from envs.waiting import ready

_SANDBOX_NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
_UID = 1000
_EXITING = 0x4
"""PF_EXITING of the kernel's include/linux/sched.h, in field 9 of /proc/<pid>/stat."""


@dataclass(frozen=True)
class Assignment:
    """What a new supervisor is to work on."""

    init_pidfd: int
    """The sandbox's PID 1."""
    channel: int
    """Socket to the backend."""
    attach: tuple[int, ...]
    """Control group files to write "0" into."""
    members: int
    """The control group's list of processes (O_PATH); -1 without control groups."""
    proc: int
    """The fork server's /proc, apart from its tree (`linux.open_apart`)."""
    init_pid: int
    workdir: str
    environment: dict[str, str]
    limits: dict[str, int]
    seccomp: bytes
    shifts_clocks: bool
    """Whether the sandbox may have a time namespace of its own."""
    sleepers: tuple[str, ...] = ()
    """Names of processes to start that do nothing."""
    warm: bool = False
    """Whether this process has imported pytest and answers for it (warm.py)."""


def assign(
    request: dict[str, Any],
    fds: Sequence[int],
    proc: int,
    tree: Rootfs,
    environment: dict[str, str],
    sleepers: tuple[str, ...] = (),
    warm: bool = False,
) -> Assignment:
    """An assignment as the fork server asks for it.

    Args:
        request: `init_pid`, `grouped` (whether there are control groups), and `limits`.
        fds: the pidfd, the channel, and of control groups what has to be written to and the list of processes.
        proc: see `Assignment`.
        tree: what the sandbox sees.
        environment: of every program in it.
        sleepers: see `Assignment`.
        warm: see `Assignment`.
    """
    init_pidfd, channel, *rest = fds
    members = rest.pop() if request["grouped"] else -1
    return Assignment(
        init_pidfd,
        channel,
        tuple(rest),
        members,
        proc,
        request["init_pid"],
        tree.workdir,
        environment,
        request["limits"],
        build_filter(shared_memory=request["grouped"]),
        tree.profile.uptime_s is not None,
        sleepers,
        warm,
    )


def run(assignment: Assignment) -> NoReturn:
    """Join the sandbox and serve it until the backend hangs up. Called in a forked child."""
    channel = socket.socket(fileno=assignment.channel)
    try:
        try:
            proc, namespace, score = _join(assignment)
            inside = _look_around(assignment, proc, namespace, score)
        except BaseException as e:  # noqa: BLE001 - the last chance to say why
            # Unread, the first request would make the kernel drop this answer when the socket closes.
            frames.receive(channel)
            channel.sendall(frames.pack({"error": f"{type(e).__name__}: {e}"}))
        else:
            Supervisor(assignment, inside, proc).serve(channel)
    except ConnectionError:
        os._exit(0)
    finally:
        os._exit(1)


def _join(assignment: Assignment) -> tuple[int, int, int]:
    """Take on the sandbox's limits, namespaces, user and filter.

    Returns:
        A directory descriptor of the outer /proc, the sandbox's PID namespace by its inode, and the file descriptor of
        this process's oom_score_adj.
    """
    kept = {assignment.init_pidfd, assignment.channel, assignment.proc, *assignment.attach, assignment.members}
    keep = sorted(kept - {-1})
    for low, high in itertools.pairwise((2, *keep, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
        os.closerange(low + 1, high)
    for fd in assignment.attach:
        os.write(fd, b"0")
        os.close(fd)
    # Opened anew: those who share an open directory share how far it has been read.
    proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=assignment.proc)
    os.close(assignment.proc)
    namespace = os.stat(f"{assignment.init_pid}/ns/pid", dir_fd=proc).st_ino  # the sandbox's user may not look
    score = os.open("self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC, dir_fd=proc)
    shifted = assignment.shifts_clocks and os.path.exists("/proc/self/ns/time")  # noqa: PTH110
    linux.setns(assignment.init_pidfd, _SANDBOX_NAMESPACES | (linux.CLONE_NEWTIME if shifted else 0))
    os.close(assignment.init_pidfd)
    os.setresgid(_UID, _UID, _UID)
    os.setresuid(_UID, _UID, _UID)
    linux.drop_capabilities()
    linux.set_parent_death_signal(signal.SIGKILL)
    linux.set_dumpable(False)
    linux.set_no_new_privileges()
    linux.install_seccomp(assignment.seccomp)
    os.umask(0o022)
    os.chdir("/")
    return proc, namespace, score


def _look_around(assignment: Assignment, proc: int, namespace: int, score: int) -> Inside:
    watched = assignment.members < 0
    sleepers = linux.start_sleepers(assignment.sleepers) if assignment.sleepers else set()

    def members() -> set[int]:
        if not watched:
            return limits.members_of(assignment.members, proc) - sleepers
        pids = (int(name) for name in os.listdir(proc) if name.isdigit() and _namespace(proc, name) == namespace)  # noqa: PTH208
        return {assignment.init_pid, *pids} - sleepers

    def bound(pid: int) -> None:
        limits.apply_rlimits(assignment.limits, watched, pid)

    watch = limits.MemoryWatch(proc, members, assignment.limits["memory_bytes"]) if watched else None
    return Inside(assignment.workdir, assignment.environment, bound, members, score, assignment.init_pid, watch)


def _namespace(proc: int, pid: str) -> int:
    try:
        return os.stat(f"{pid}/ns/pid", dir_fd=proc).st_ino
    except OSError:
        return 0


class Supervisor:
    """Answers the backend's requests, one at a time."""

    def __init__(self, assignment: Assignment, inside: Inside, proc: int) -> None:
        """The process has joined the sandbox; `proc` is a directory descriptor of the outer /proc."""
        self._assignment, self._inside, self._proc = assignment, inside, proc
        self._shell = PersistentShell(inside)
        self._operations: dict[str, Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]] = {
            "populate": self._populate,
            "shell": self._run_shell,
            "directory": lambda request, body: ({"path": self._shell.directory(self._proc)}, b""),
            "enter": self._enter,
            "exec": self._run_program,
            "read": self._read,
            "write": self._write,
            "files": self._files,
            "stats": self._stats,
        }

    def serve(self, channel: socket.socket) -> NoReturn:
        """Answer until the backend hangs up.

        Raises:
            ConnectionError: the backend hung up, or the sandbox ended under a command.
        """
        while True:
            if self._inside.memory is not None:
                self._watch_background(channel, self._inside.memory)
            request, body, fd = frames.receive_header(channel)
            try:
                # The input of a program is read after the fork: with it comes what makes a grader's report genuine.
                late = request["op"] == "exec"
                more = {"channel": fd, "stdin": body}
                answer, payload = self._operations[request["op"]](request | more, b"" if late else body.read())
            except OSError as e:
                answer, payload = {"errno": e.errno or errno.EIO, "path": os.fsdecode(e.filename or "")}, b""
            except ValueError as e:
                answer, payload = {"errno": errno.EINVAL, "path": str(e)}, b""
            except Exception as e:  # noqa: BLE001 - who waits must learn why
                answer, payload = {"error": f"{type(e).__name__}: {e}"}, b""
            body.read()  # what a command that could not start has left
            if request["op"] in ("shell", "exec") and self._is_ending():
                # The kernel has killed the command with everything else: that is not how the command ended.
                raise ConnectionError
            channel.sendall(frames.pack(answer, payload))

    def _is_ending(self) -> bool:
        """Whether PID 1 has ended or is about to; no program inside the sandbox can bring that about."""
        try:
            fd = os.open(f"{self._assignment.init_pid}/stat", os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return True
        try:
            state, *fields = os.read(fd, 1024).rpartition(b")")[2].split()
        except OSError:
            return True
        finally:
            os.close(fd)
        return state in (b"Z", b"X") or bool(int(fields[5]) & _EXITING)

    def _watch_background(self, channel: socket.socket, memory: limits.MemoryWatch) -> None:
        """Between commands: look at the memory of what was left running."""
        while not ready(channel.fileno(), timeout_s=limits.WATCH_INTERVAL_S):
            if memory.is_over():
                kill_others(self._inside.members, {self._assignment.init_pid})
            elif len(self._inside.members()) <= 2:
                return  # PID 1 and the shell

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return os.path.join(self._inside.workdir, path)  # noqa: PTH118 - bytes-safe, and no normalisation of ".."

    def _run_shell(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return _answer(self._shell.run(body, request["timeout_s"], self._assignment.limits["output_bytes"]))

    def _enter(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        self._shell.enter(request["path"])
        return {}, b""

    def _run_program(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        argv, extra = request["argv"], request["env"]
        environment = self._inside.environment | extra

        def start() -> None:
            if self._assignment.warm and warm.serves(argv, extra):
                warm.run(argv[2], argv[3:], environment)
            execute(argv, environment)

        cap = self._assignment.limits["output_bytes"]
        late, channel = request["stdin"], request["channel"]
        return _answer(run_program(self._inside, start, late, request["timeout_s"], cap, channel))

    def _read(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {}, trees.read_file(self._path(request["path"]), request["max_bytes"], 0)

    def _write(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        path = self._path(request["path"])
        folder = os.path.dirname(path)  # noqa: PTH120
        try:
            trees.make_folders(folder)
            trees.write_file(path, body, self._assignment.limits["file_bytes"])
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), request["path"]) from e
        return {}, b""

    def _populate(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        start = 0
        for path, size in request["files"]:
            self._write({"path": path}, body[start : start + size])
            start += size
        return {}, b""

    def _stats(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Without control groups: the peak that the watching saw, and the CPU time of all children that have ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak = 0
        if self._inside.memory is not None:
            self._inside.memory.is_over()
            peak = self._inside.memory.peak_bytes
        return {
            "peak_memory_bytes": peak,
            "cpu_seconds": ended.ru_utime + ended.ru_stime,
            "num_processes": len(self._inside.members()) - 1,
        }, b""

    def _files(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        found: list[tuple[str, int]] = []
        contents: list[bytes] = []
        left = request["max_bytes"]
        top = self._inside.workdir
        for path in trees.walk(top):
            try:
                content = trees.read_file(os.path.join(top, path), left + 1, os.O_NOFOLLOW)  # noqa: PTH118
            except (PermissionError, FileNotFoundError):
                continue
            # A name counts too: a million empty files are no small answer.
            left -= len(content) + len(os.fsencode(path))
            if left < 0:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), top)
            found.append((path, len(content)))
            contents.append(content)
        return {"files": found}, b"".join(contents)


def _answer(result: Result) -> tuple[dict[str, Any], bytes]:
    return {"exit_code": result.exit_code, "timed_out": result.timed_out, "truncated": result.truncated}, result.output
