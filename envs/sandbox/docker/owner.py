"""Whose a container is: labels that say which process made it, and whether that process has gone.

Only the kernel on which a process ran can say if it still does. So what bears another boot's mark, another machine's,
or was made where process numbers are counted anew (in a container), is left alone: it ends with its own lifetime.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import docker
import docker.errors

from envs.sandbox.state import start_time

KIND = "composer.kind"
SANDBOX = "sandbox"
IMAGE = "image"
BACKEND = "composer.backend"
_RUN, _HOST, _BOOT = "composer.run", "composer.host", "composer.boot"
_NAMESPACE, _PID, _START = "composer.pid_namespace", "composer.pid", "composer.start_time"


def labels(run_label: str, backend: str) -> dict[str, str]:
    """What a container of this process bears."""
    return {
        KIND: SANDBOX,
        BACKEND: backend,
        _RUN: run_label,
        _HOST: socket.gethostname(),
        _BOOT: _boot(),
        _NAMESPACE: _pid_namespace(),
        _PID: str(os.getpid()),
        _START: str(start_time(os.getpid())),
    }


def is_dead(labels: Mapping[str, str]) -> bool:
    """Whether the process that made a container has certainly ended.

    Example:
        >>> is_dead({"composer.kind": "sandbox", "composer.boot": "another machine's"})
        False
    """
    if labels.get(_BOOT) != _boot() or labels.get(_NAMESPACE) != _pid_namespace():
        return False
    try:
        return start_time(int(labels[_PID])) != int(labels[_START])
    except (KeyError, ValueError):
        return False


def remove_dead(client: docker.APIClient) -> int:
    """Remove the containers of processes that have ended; returns how many there were."""
    num_removed = 0
    for container in client.containers(all=True, filters={"label": f"{KIND}={SANDBOX}"}):
        if is_dead(container.get("Labels") or {}) and remove(client, container["Id"]):
            num_removed += 1
    return num_removed


def remove(client: docker.APIClient, container: str) -> bool:
    """Remove a container with all that runs in it; false if there was none, or the engine is at it already."""
    try:
        client.remove_container(container, force=True, v=True)
    except docker.errors.APIError as e:
        if e.status_code in (404, 409):
            return False
        raise
    return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
