"""The fork server: one small process a backend, which starts, watches and ends that backend's sandboxes.

    owner (the backend's process)
    `- watchdog (watchdog.py)
       `- fork server   PID 1 of a PID namespace: when it ends, the kernel ends everything below it
          |- launcher   forks the others (launcher.py)
          |- bwrap      one a sandbox; its child is the sandbox's PID 1
          `- supervisor one a sandbox (supervisor.py); a second one, with pytest, where that is asked for (warm.py)

Why it exists: only from inside a mount namespace of our own can the overlay's upper layer be a tmpfs of a given size
(`disk_bytes`), for ordinary users too; forking a process of 20 MB is far cheaper than forking one that holds a model;
and warm.py needs a parent that has imported pytest.

Control channel: a SOCK_SEQPACKET pair, one JSON message a packet, file descriptors beside it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import selectors
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from envs.sandbox import layers, linux, rootfs, supervisor, warm
from envs.sandbox.children import Job, Running
from envs.sandbox.launcher import Launcher
from envs.sandbox.programs import IGNORED
from envs.sandbox.realism import network
from envs.sandbox.rootfs import environment
from envs.waiting import ready

CLOSED = 3
"""Exit status after the owner's last word, as against its silence."""

_JOB_TIMEOUT_S = 60.0
_MESSAGE_BYTES = 2**16
_PACKET_FDS = 8


def run(control: socket.socket, settings: dict[str, Any]) -> NoReturn:
    """Build the sandboxes' world, then serve. Called in PID 1 of a fresh PID namespace; never returns.

    Args:
        control: channel to the owner.
        settings: what `control.ForkServerClient` sent.
    """
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):  # those that cannot be changed
            signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    linux.forget_arguments()  # a sandbox's sleepers show them
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        # Not before the fork: pivot_root would take the watchdog along, which works on the host's file system.
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET)
        tree = rootfs.Rootfs.from_dict(settings["rootfs"])
        if tree.certificate:
            import envs.egress.gate  # noqa: F401 - this process cannot see the host's files any more when it needs them
            import envs.egress.trust  # noqa: F401
        rootfs.build(tree, settings["state"] + "/root")
        # What each child would have to do otherwise.
        if Path("/proc/self/setgroups").read_text().strip() == "allow":
            os.setgroups([])
        os.environ.clear()
        os.environ.update(environment(tree))
        launcher = Launcher(tree, environment(tree))
        if tree.python:
            warm.preload()
        gc.collect()
        gc.freeze()
        server = ForkServer(control, tree, launcher)
    except BaseException as e:  # noqa: BLE001 - the owner must learn why
        control.send(json.dumps({"error": f"{type(e).__name__}: {e}"}).encode())
        os._exit(1)
    control.send(json.dumps({"ok": True}).encode())
    try:
        server.loop()
    except Exception as e:  # noqa: BLE001
        control.send(json.dumps({"error": f"the fork server failed: {traceback.format_exc(limit=-2)} {e}"}).encode())
    finally:
        os._exit(1)


class ForkServer:
    """Starts and ends sandboxes on request; tells the owner when one has ended."""

    def __init__(self, control: socket.socket, tree: rootfs.Rootfs, launcher: Launcher) -> None:
        """The process is PID 1 of its namespace and has its own root directory."""
        self._control, self._tree, self._launcher = control, tree, launcher
        self._environment = environment(tree)
        self._network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._sandboxes: dict[str, Running] = {}
        self._jobs: dict[int, Job] = {}
        """By process."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(read_end, selectors.EVENT_READ, read_end)

    def loop(self) -> NoReturn:
        """Serve until the owner hangs up; leaving ends every process of every sandbox."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.data is None:
                    self._on_request()
                elif isinstance(key.data, int):
                    os.read(key.data, 4096)
                    self._reap()
                elif key.fd in self._selector.get_map() and self._sandboxes.get(key.data.name) is key.data:
                    # An earlier event of the same round may have ended the sandbox.
                    self._on_sandbox(key.data, key.fd)
            now = time.monotonic()
            for sandbox in [s for s in self._sandboxes.values() if s.deadline <= now]:
                sandbox.deadline = now + 5.0
                self._end(sandbox, f"its lifetime of {sandbox.request['lifetime_s']:g} s (lifetime_s) was over")
            for pid in [pid for pid, job in self._jobs.items() if job.deadline <= now]:
                os.kill(pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        deadlines = [each.deadline for each in (*self._sandboxes.values(), *self._jobs.values())]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_request(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _PACKET_FDS)
        if not data:
            os._exit(0)
        for fd in fds:
            os.set_inheritable(fd, False)
        request = json.loads(data)
        if request["op"] == "close":
            os._exit(CLOSED)
        if request["op"] == "start":
            self._start(request, fds)
        elif request["op"] in ("copy", "archive", "extract"):
            self._make_layer(request, fds)
        elif request["op"] == "drop":
            for job in self._jobs.values():
                job.is_wanted &= job.snapshot != request["snapshot"]
            _drop(request["snapshot"])
        elif request["op"] == "warm":
            sandbox = self._sandboxes.get(request["id"])
            if sandbox is not None and sandbox.supervisor and not sandbox.reason:
                self._warm(sandbox, fds[0], fds[1:])
            for fd in fds:
                os.close(fd)
        elif request["id"] in self._sandboxes:
            self._end(self._sandboxes[request["id"]], "it was stopped")

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        channel, *rest = fds
        egress = rest.pop() if request["egress"] else -1
        members = rest.pop() if request["grouped"] else -1
        stdin_read, stdin_write = os.pipe2(os.O_CLOEXEC)
        output_read, output_write = os.pipe2(os.O_CLOEXEC)
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        # PID 1 is `cat`: the byte comes back as soon as it runs, that is, when the sandbox is complete.
        os.write(stdin_write, b"r")
        os.set_blocking(output_read, False)
        try:
            streams = (stdin_read, output_write, info_write)
            monitor = self._launcher.start(
                request["disk_bytes"], request["grouped"], request["snapshots"], request["copied"], streams, rest
            )
        except OSError as e:
            for fd in (*fds, stdin_write, output_read, info_read):
                os.close(fd)
            self._tell({"event": "ended", "id": request["id"], "reason": str(e)})
            return
        finally:
            for fd in (stdin_read, output_write, info_write):
                os.close(fd)
        sandbox = Running(
            request["id"],
            request,
            channel,
            tuple(rest),
            members,
            monitor,
            stdin_write,
            output_read,
            info_read,
            egress,
            time.monotonic() + request["lifetime_s"],
            alive={monitor},
        )
        self._sandboxes[sandbox.name] = sandbox
        self._selector.register(output_read, selectors.EVENT_READ, sandbox)

    def _make_layer(self, request: dict[str, Any], fds: list[int]) -> None:
        """Copy what a sandbox has written, or read or write an archive, in a process of its own."""
        snapshot = request["snapshot"]
        try:
            if request["op"] == "archive":
                pid = self._launcher.archive(snapshot, fds[0])
            elif request["op"] == "extract":
                pid = self._launcher.extract(snapshot, request["max_bytes"], fds[0])
            else:
                sandbox = self._sandboxes.get(request["id"])
                if sandbox is None or sandbox.reason or not sandbox.supervisor:
                    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
                pid = self._launcher.copy(sandbox.monitor, snapshot, request["max_bytes"])
        except OSError as e:
            self._tell({"event": "done", "job": request["job"], "errno": e.errno})
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._jobs[pid] = Job(request["job"], request["op"], snapshot, time.monotonic() + _JOB_TIMEOUT_S)

    def _end_job(self, job: Job, status: int) -> None:
        code, used = os.waitstatus_to_exitcode(status), 0
        if code < 0:
            code = errno.ETIMEDOUT  # nobody else has reason to send a signal
        elif code and job.op != "copy":
            code = errno.EIO  # tar's exit codes are no `errno`
        if code == 0 and job.is_wanted:
            usage = os.statvfs(f"{layers.FOLDER}/{job.snapshot}")
            used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        elif job.op != "archive":
            _drop(job.snapshot)
        self._tell({"event": "done", "job": job.number, "errno": code, "bytes": used})

    def _on_sandbox(self, sandbox: Running, fd: int) -> None:
        if fd == sandbox.init_pidfd:
            self._selector.unregister(fd)
            self._end(sandbox, "its PID 1 ended")
            return
        try:
            text = os.read(sandbox.output, 4096)
        except BlockingIOError:
            return
        sandbox.text += text
        if sandbox.text == b"r" and text:
            self._selector.unregister(sandbox.output)
            self._supervise(sandbox)
        elif not text or sandbox.text.endswith(b"\n"):
            # With SIGCHLD ignored bwrap's monitor outlives a child that failed: its message is the sign.
            self._selector.unregister(sandbox.output)
            self._end(sandbox, sandbox.text.decode(errors="replace").strip())

    def _supervise(self, sandbox: Running) -> None:
        sandbox.init_pid = json.loads(os.read(sandbox.info, 4096))["child-pid"]
        members = [sandbox.members] if sandbox.members >= 0 else []
        try:
            sandbox.init_pidfd = os.pidfd_open(sandbox.init_pid)
            self._selector.register(sandbox.init_pidfd, selectors.EVENT_READ, sandbox)
            self._connect(sandbox)
            sandbox.supervisor = self._launcher.supervise(
                sandbox.init_pid,
                sandbox.request["limits"],
                sandbox.request["grouped"],
                sandbox.init_pidfd,
                sandbox.channel,
                [*sandbox.attach, *members],
            )
        except OSError as e:
            self._end(sandbox, str(e))
            return
        sandbox.alive.add(sandbox.supervisor)
        # Only the supervisor holds the other end from here on: its end is then the end of the channel.
        for fd in (sandbox.channel, *sandbox.attach):
            os.close(fd)
        sandbox.channel, sandbox.attach = -1, ()

    def _connect(self, sandbox: Running) -> None:
        """Give a sandbox the network interfaces of its profile, and its way to the egress proxy.

        Here, since this process lasts: a fork would have to copy all the memory that this takes.

        Raises:
            OSError: the proxy cannot be reached.
        """
        wanted = self._tree.profile.network
        if wanted is None and sandbox.egress < 0:
            return
        linux.setns(sandbox.init_pidfd, linux.CLONE_NEWNET)
        try:
            address = None
            if wanted is not None:
                with contextlib.suppress(OSError):  # a kernel without such interfaces
                    network.configure(wanted)
                    address = wanted.address.partition("/")[0]
            if sandbox.egress >= 0:
                from envs.egress import gate  # without a network, nothing of it is loaded

                control, sandbox.egress = sandbox.egress, -1
                gate.open_gate(control, sandbox.name, address)
        finally:
            linux.setns(self._network, linux.CLONE_NEWNET)

    def _warm(self, sandbox: Running, channel: int, rest: list[int]) -> None:
        """Put a second supervisor into a sandbox, which has pytest; `rest` as of `supervisor.assign`."""
        bounds = sandbox.request["limits"]
        if not sandbox.request["grouped"]:  # with groups, the backend has seen to it
            bounds = bounds | {"num_processes": bounds["num_processes"] + 1}
        request = sandbox.request | {"init_pid": sandbox.init_pid, "limits": bounds}
        try:
            pid = os.fork()
        except OSError as e:
            self._end(sandbox, str(e))
            return
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            fds = [sandbox.init_pidfd, channel, *rest]
            supervisor.run(
                supervisor.assign(request, fds, self._launcher.proc, self._tree, self._environment, warm=True)
            )
        sandbox.alive.add(pid)

    def _end(self, sandbox: Running, reason: str) -> None:
        """Kill a sandbox. The owner is told when nothing of it is left."""
        sandbox.reason = sandbox.reason or reason
        # The supervisors first: PID 1 is not gone before their children, its fellows, have been reaped.
        for pid in sandbox.alive - {sandbox.monitor}:
            os.kill(pid, signal.SIGKILL)
        if sandbox.init_pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(sandbox.init_pidfd, signal.SIGKILL)
            # bwrap's monitor must see PID 1 through: it is killed only when that is gone.
            if not ready(sandbox.init_pidfd, timeout_s=0):
                return
        if sandbox.monitor in sandbox.alive:
            os.kill(sandbox.monitor, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._launcher.pid:
                os._exit(1)  # the owner starts another fork server when it next needs one
            if pid in self._jobs:
                self._end_job(self._jobs.pop(pid), status)
            for sandbox in [s for s in self._sandboxes.values() if pid in s.alive]:
                sandbox.alive.discard(pid)
                if sandbox.alive:
                    self._end(sandbox, "bwrap ended" if pid == sandbox.monitor else "its supervisor ended")
                else:
                    self._forget(sandbox)

    def _forget(self, sandbox: Running) -> None:
        if not sandbox.reason and sandbox.output in self._selector.get_map():
            with contextlib.suppress(OSError):
                sandbox.text += os.read(sandbox.output, 4096)
        reason = sandbox.reason or sandbox.text.decode(errors="replace").strip()
        for fd in (
            sandbox.channel,
            *sandbox.attach,
            sandbox.members,
            sandbox.stdin,
            sandbox.output,
            sandbox.info,
            sandbox.egress,
            sandbox.init_pidfd,
        ):
            if fd >= 0:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
                os.close(fd)
        del self._sandboxes[sandbox.name]
        self._tell({"event": "ended", "id": sandbox.name, "reason": reason})


def _drop(snapshot: str) -> None:
    """Sandboxes that have it as a layer keep it: its memory is free when the last of them has ended."""
    folder = f"{layers.FOLDER}/{snapshot}"
    with contextlib.suppress(OSError):
        linux.unmount(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106
