"""The watchdog of a fork server: has the host's processes and files, and outlives its owner by a moment.

It ends the fork server when the owner has gone, however it went, and then removes what is on disk in the owner's
place. It is run as a script, by its own path, and imports nothing but the standard library and its neighbours.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # The interpreter was started without a site; the neighbours are where this file is.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from envs.sandbox import forkserver, linux
from envs.sandbox.state import remove_leftovers
from envs.waiting import ready

_OWNER_ENDS_S = 2.0


def main() -> NoReturn:
    """Become the watchdog of `argv[1]` (the owner's PID) on the control socket `argv[2]`, and fork the fork server."""
    owner_pid, control_fd = int(sys.argv[1]), int(sys.argv[2])
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        os._exit(0)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    settings = json.loads(control.recv(2**22))
    error = _leave_namespaces()
    if error:
        control.send(json.dumps({"error": error}).encode())
        os._exit(1)
    child = os.fork()
    if child == 0:
        linux.set_parent_death_signal(signal.SIGKILL)
        # All but the control socket: what stays open, the lock file too, every program in a sandbox could open again.
        os.closerange(3, control_fd)
        os.closerange(control_fd + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        forkserver.run(control, settings)
    control.close()
    _watch(owner, child, settings)


def _leave_namespaces() -> str:
    """Enter fresh namespaces; returns what is in the way, or an empty string."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.CLONE_NEWPID if uid == 0 else linux.CLONE_NEWPID | linux.CLONE_NEWUSER)
        if uid != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as e:
        return f"this machine does not let us make namespaces ({e})"
    return ""


def _watch(owner: int, child: int, settings: dict[str, Any]) -> NoReturn:
    """Wait for the fork server to end, ending it if the owner goes first; then clean up in the owner's place."""
    ended = os.pidfd_open(child)
    if owner in ready(owner, ended):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    closed = os.waitstatus_to_exitcode(status) == forkserver.CLOSED
    # An owner that closed its backend, or lives on for another reason, cleans up itself. One that is ending has closed
    # its files, which ends the fork server, some moments before it is seen to have ended.
    if not closed and ready(owner, timeout_s=_OWNER_ENDS_S):
        remove_leftovers(settings["state"], settings["control_groups"])
    os._exit(0)


if __name__ == "__main__":
    main()
