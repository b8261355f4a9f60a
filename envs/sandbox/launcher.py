"""Forks bubblewrap and supervisors for the fork server, whose children they are all the same (CLONE_PARENT).

The fork server holds pytest for warm.py, and each page of that is copied, counted and let go of with every fork. This
process was forked before: where this was written, a fork of it that becomes another program takes 1.5 ms of CPU time
instead of 4.2.

Channel: a SOCK_SEQPACKET pair, one JSON message a packet, file descriptors beside the request.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from envs.sandbox import layers, limits, linux, rootfs, supervisor
from envs.sandbox.realism.profile import FAKES, fakes
from envs.sandbox.seccomp import build_filter

_MESSAGE_BYTES = 4096
_PACKET_FDS = 8
_SECCOMP_FD, _INFO_FD = 98, 99


class Launcher:
    """The fork server's end."""

    def __init__(self, tree: rootfs.Rootfs, environment: dict[str, str]) -> None:
        """Fork the process. The caller has built the tree, and has imported nothing that is large.

        Args:
            tree: what sandboxes see.
            environment: of every program in them.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.proc = linux.open_apart("/proc")
        """For the supervisors."""
        self.pid = os.fork()
        if self.pid == 0:
            linux.set_parent_death_signal(signal.SIGKILL)
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            for low, high in itertools.pairwise((2, *sorted((theirs.fileno(), self.proc)), most)):
                os.closerange(low + 1, high)
            try:
                _Server(theirs, self.proc, tree, environment).loop()
            finally:
                os._exit(1)
        theirs.close()

    def start(
        self,
        disk_bytes: int,
        grouped: bool,
        snapshots: Sequence[str],
        copied: str,
        streams: tuple[int, int, int],
        attach: Sequence[int],
    ) -> int:
        """Start a bubblewrap whose PID 1 is `Rootfs.pid1`.

        Args:
            disk_bytes: of all that the sandbox may write to its file system.
            grouped: whether it has control groups.
            snapshots: what lies between the base state and what it writes, the newest last.
            copied: a snapshot that it begins with a copy of instead; "": none.
            streams: file descriptors of standard input, of output and errors, and of what bubblewrap says of itself.
            attach: files of control groups into which it writes "0" first.

        Returns:
            The process, a child of the caller's.

        Raises:
            OSError: no more processes may be made.
        """
        request = {
            "op": "start",
            "disk_bytes": disk_bytes,
            "grouped": grouped,
            "snapshots": list(snapshots),
            "copied": copied,
        }
        return self._ask(request, [*streams, *attach])

    def supervise(
        self, init_pid: int, bounds: dict[str, int], grouped: bool, init_pidfd: int, channel: int, rest: Sequence[int]
    ) -> int:
        """Start a supervisor (supervisor.py).

        Args:
            init_pid: the sandbox's PID 1.
            bounds: limits by name, as of `limits.apply_rlimits`.
            grouped: whether the sandbox has control groups.
            init_pidfd: of PID 1.
            channel: to the backend.
            rest: files of control groups, as of `start`, and then the list of the processes in them.

        Returns:
            The process, a child of the caller's.

        Raises:
            OSError: no more processes may be made.
        """
        request = {"op": "supervise", "init_pid": init_pid, "limits": bounds, "grouped": grouped}
        return self._ask(request, [init_pidfd, channel, *rest])

    def copy(self, monitor: int, snapshot: str, max_bytes: int) -> int:
        """Start to copy what a sandbox has written to a snapshot of its own.

        Args:
            monitor: the sandbox's bubblewrap.
            snapshot: the new one.
            max_bytes: that it may take.

        Returns:
            The process, a child of the caller's; its exit status is 0, or the `errno` of what went wrong.

        Raises:
            OSError: no more processes may be made.
        """
        return self._ask({"op": "copy", "monitor": monitor, "snapshot": snapshot, "max_bytes": max_bytes}, [])

    def archive(self, snapshot: str, output: int) -> int:
        """Start to write a layer as a tar archive to a file descriptor; else as `copy`."""
        return self._ask({"op": "archive", "snapshot": snapshot}, [output])

    def extract(self, snapshot: str, max_bytes: int, source: int) -> int:
        """Start to make a layer from what `archive` wrote, in a sandbox of its own; else as `copy`."""
        return self._ask({"op": "extract", "snapshot": snapshot, "max_bytes": max_bytes}, [source])

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        socket.send_fds(self._channel, [json.dumps(request).encode()], fds)
        answer = self._channel.recv(_MESSAGE_BYTES)
        if not answer:
            raise ConnectionError("the launcher of sandboxes has ended")
        fields = json.loads(answer)
        if number := fields.get("errno"):
            raise OSError(number, os.strerror(number))
        return fields["pid"]


class _Server:
    """The launcher's end."""

    def __init__(self, channel: socket.socket, proc: int, tree: rootfs.Rootfs, environment: dict[str, str]) -> None:
        self._channel, self._proc, self._tree, self._environment = channel, proc, tree, environment
        for grouped in (True, False):
            build_filter(shared_memory=grouped)  # which remembers it
        gc.collect()
        gc.freeze()

    def loop(self) -> NoReturn:
        """Serve until the fork server hangs up."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, _PACKET_FDS)
            if not data:
                os._exit(0)
            for fd in fds:
                os.set_inheritable(fd, False)
            request = json.loads(data)
            become = self._work(request, fds)
            try:
                pid = linux.fork_for_parent()
                if pid == 0:
                    become()
                answer = {"pid": pid}
            except OSError as e:
                answer = {"errno": e.errno}
            for fd in fds:
                os.close(fd)
            self._channel.send(json.dumps(answer).encode())

    def _work(self, request: dict[str, Any], fds: list[int]) -> Callable[[], NoReturn]:
        """What a child has to do: all that can be is prepared before the fork."""
        match request["op"]:
            case "start":
                arguments = self._arguments(request["disk_bytes"], tuple(request["snapshots"]))
                return functools.partial(self._become_bwrap, request, arguments, fds)
            case "supervise":
                sleepers = self._tree.profile.processes
                assignment = supervisor.assign(
                    request, fds, self._proc, self._tree, self._environment, sleepers=sleepers
                )
                return functools.partial(supervisor.run, assignment)
            case "copy":
                return functools.partial(layers.copy, request["monitor"], request["snapshot"], request["max_bytes"])
            case "archive":
                return functools.partial(layers.archive, request["snapshot"], fds[0])
            case other:
                assert other == "extract"
                uid, size = self._tree.uid, request["max_bytes"]
                return functools.partial(layers.extract, request["snapshot"], size, uid, fds[0])

    def _become_bwrap(self, request: dict[str, Any], arguments: list[str], fds: list[int]) -> NoReturn:
        stdin, output, info, *attach = fds
        try:
            os.dup2(stdin, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for fd in attach:
                os.write(fd, b"0")
            linux.unshare(linux.CLONE_NEWNS)
            if self._tree.profile.uptime_s is not None:
                with contextlib.suppress(OSError):  # a kernel without time namespaces
                    linux.shift_clocks(self._tree.profile.uptime_s)
            layers.mount("/disk", request["disk_bytes"] - limits.shm_bytes(request["disk_bytes"]))
            os.mkdir("/disk/upper", 0o755)  # noqa: PTH102
            os.mkdir("/disk/work", 0o755)  # noqa: PTH102
            uid = self._tree.uid
            if uid:
                os.chown("/disk/upper", uid, uid)
                os.chown("/disk/work", uid, uid)
            if request["copied"]:
                layers.copy_folder(f"{layers.FOLDER}/{request['copied']}", "/disk/upper")
            if uid:
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            # Ignored SIGCHLD survives exec: the kernel then reaps PID 1's adopted children by itself.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.dup2(info, _INFO_FD)
            program = os.memfd_create("seccomp")
            os.write(program, build_filter(shared_memory=request["grouped"]))
            os.lseek(program, 0, os.SEEK_SET)
            os.dup2(program, _SECCOMP_FD)
            for fd in (_INFO_FD, _SECCOMP_FD):
                os.set_inheritable(fd, True)  # dup2 of a number to itself changes nothing
            os.execv(rootfs.BWRAP, arguments)
        except OSError as e:
            os.write(2, str(e).encode())
        finally:
            os._exit(1)

    @functools.lru_cache(256)  # noqa: B019 - there is one launcher, for as long as its process lives
    def _arguments(self, disk_bytes: int, snapshots: tuple[str, ...]) -> list[str]:
        """Bubblewrap's command line; made before the fork, since each page that a child touches has to be copied."""
        profile = self._tree.profile
        # In an ordinary user's sandbox that user owns what root should: its modes protect nothing.
        kept = () if self._tree.uid else ("--ro-bind", "/skel/etc", "/etc", "--ro-bind", "/skel/opt", "/opt")
        settings = [word for name, value in self._environment.items() for word in ("--setenv", name, value)]
        return [
            rootfs.BWRAP,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"),
            *("--hostname", self._tree.profile.hostname, "--new-session", "--die-with-parent", "--as-pid-1"),
            *("--cap-drop", "ALL", "--seccomp", str(_SECCOMP_FD), "--info-fd", str(_INFO_FD), "--clearenv", *settings),
            *("--overlay-src", "/skel"),
            *(word for snapshot in snapshots for word in ("--overlay-src", f"{layers.FOLDER}/{snapshot}")),
            *("--overlay", "/disk/upper", "/disk/work", "/"),
            *kept,
            *rootfs.bwrap_binds(self._tree.python, self._tree.folders),
            *("--proc", "/proc", "--dev", "/dev"),
            *(w for name in fakes(profile) for w in ("--ro-bind", f"{FAKES}/{name}", f"/proc/{name}")),
            *(w for name in profile.devices for w in ("--symlink", "null", f"/dev/{name}")),
            *("--size", str(limits.shm_bytes(disk_bytes)), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--chdir", "/", "--argv0", profile.first_command, "--", self._tree.pid1),
        ]
