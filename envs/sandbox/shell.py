"""The persistent shell of a sandbox: one bash that runs a command line after the other. Runs in the supervisor.

Protocol: the shell reads one NUL-terminated command at a time from a pipe, runs it by `eval` with that pipe and the
status pipe closed, and then writes exit code and directory to the status pipe. Whatever a command prints is output:
there is no sentinel to forge. (Code that the shell itself runs can still find the status pipe, and fool itself about an
exit code. It gains nothing: verdicts come from `exec`, whose codes are the kernel's.)
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

from envs.sandbox.programs import CHUNK, GRACE_S, IGNORED, Inside, Result, Watch, reap, start_child
from envs.waiting import ready

_OUTPUT_FD, _COMMAND_FD, _STATUS_FD = 197, 198, 199
# The streams are given anew to each command, since the one before may have closed its own by `exec`.
_LOOP = (
    f"while IFS= read -r -d '' -u {_COMMAND_FD}; do "
    f'eval "$REPLY" </dev/null >&{_OUTPUT_FD} 2>&{_OUTPUT_FD} '
    f"{_OUTPUT_FD}>&- {_COMMAND_FD}<&- {_STATUS_FD}>&-; "
    f'printf \'%s %s\\0\' "$?" "$PWD" >&{_STATUS_FD}; done'
)


class PersistentShell:
    """A bash that lasts from command to command, and is replaced when it ends."""

    def __init__(self, inside: Inside) -> None:
        """Nothing starts before the first command."""
        self._inside = inside
        self._directory = inside.workdir
        self._pid = 0
        self._command = self._status = self._output = self._pidfd = -1

    def run(self, command: bytes, timeout_s: float, cap: int) -> Result:
        """Run a command line.

        Args:
            command: any text without NUL; several lines are fine.
            timeout_s: at this deadline the shell and everything that the command started are killed.
            cap: bytes of output to keep.
        """
        if b"\0" in command:
            return Result(2, b"bash: a command cannot contain a NUL byte\n")
        if self._pid and reap(self._pid) is not None:
            self._close()
        if not self._pid:
            try:
                self._start()
            except OSError as e:
                what = "cannot fork" if e.filename is None else os.fsdecode(e.filename)
                message = f"{what}: {e.strerror}\n".encode(errors="surrogateescape")
                return Result(127 if isinstance(e, FileNotFoundError) else 126, message)
        keep = self._inside.members() - {self._pid}
        watch = Watch(self._inside, self._output, cap, timeout_s, keep)
        if self._send(command + b"\0", time.monotonic() + timeout_s):
            watch.wait(self._status)
        status = b""
        if not watch.timed_out:
            with contextlib.suppress(BlockingIOError):
                status = os.read(self._status, 2**13)
            if not status:
                # The shell closed its end: it ended, or became another program by `exec`.
                watch.wait(self._pidfd)
        code, _, directory = status.rstrip(b"\0").partition(b" ")
        if code.isdigit():
            self._directory = os.fsdecode(directory)
            return watch.result(int(code))
        return self._end(watch)

    def directory(self, proc: int) -> str:
        """Where the shell is, or would begin: as the last command named it, which may be by a symbolic link.

        Args:
            proc: a directory descriptor of the outer /proc.
        """
        if not self._pid:
            return self._directory
        try:
            here = os.readlink(f"{self._pid}/cwd", dir_fd=proc)
            now = os.stat(here)  # noqa: PTH116
        except OSError:  # it was removed, and has no name any more
            return self._directory
        with contextlib.suppress(OSError):
            if os.path.samestat(now, os.stat(self._directory)):  # noqa: PTH116
                return self._directory
        return here  # it was moved

    def enter(self, directory: str) -> None:
        """Have a shell that has not begun yet begin there.

        Raises:
            OSError: there is no such directory.
        """
        os.close(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        if not self._pid:
            self._directory = directory

    def _end(self, watch: Watch) -> Result:
        """Collect a shell that has ended, or has to. Its successor starts in the directory of the last command."""
        code = self._collect()
        if code is None:
            os.kill(self._pid, signal.SIGKILL)
            code = self._collect()
        result = watch.result(128 + signal.SIGKILL if code is None else code)
        self._close()
        return result

    def _collect(self) -> int | None:
        ready(self._pidfd, timeout_s=GRACE_S)
        return reap(self._pid)

    def _send(self, data: bytes, deadline: float) -> bool:
        while data:
            try:
                data = data[os.write(self._command, data[:CHUNK]) :]
            except BlockingIOError:
                if not ready(self._command, timeout_s=deadline - time.monotonic(), to_write=True):
                    return False
            except BrokenPipeError:
                return False
        return True

    def _start(self) -> None:
        command_read, self._command = os.pipe2(os.O_CLOEXEC)
        self._status, status_write = os.pipe2(os.O_CLOEXEC)
        self._output, output_write = os.pipe2(os.O_CLOEXEC)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for fd in (self._command, self._status, self._output):
            os.set_blocking(fd, False)

        streams = {0: null, 1: output_write, 2: output_write}
        streams |= {_OUTPUT_FD: output_write, _COMMAND_FD: command_read, _STATUS_FD: status_write}
        try:
            os.chdir(self._directory if os.path.isdir(self._directory) else self._inside.workdir)  # noqa: PTH112
            # Not by a fork, which would copy what this process has in memory. So bash has no limits when it begins;
            # but it has nothing to run either, before the first command is sent.
            start = functools.partial(
                os.posix_spawnp,
                "bash",
                ["bash", "--noprofile", "--norc", "-c", _LOOP],
                self._inside.environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in streams.items()],
                setsid=True,
                setsigdef=IGNORED,
            )
            self._pid = start_child(self._inside, start)
            self._pidfd = os.pidfd_open(self._pid)
            self._inside.bound(self._pid)
        except OSError:
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._close()
            raise
        finally:
            os.chdir("/")
            for fd in (command_read, status_write, output_write, null):
                os.close(fd)

    def _close(self) -> None:
        for fd in (self._command, self._status, self._output, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._pid = 0
        self._command = self._status = self._output = self._pidfd = -1
