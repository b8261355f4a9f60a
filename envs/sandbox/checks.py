"""What `composer doctor` says about this machine's ability to run bubblewrap sandboxes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from composer.contract import Finding
from envs.sandbox.limits import ControlGroups, LimitError
from envs.sandbox.trial import try_out

_SYSCTLS = (
    ("kernel.unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user.max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Settings with which some distributions forbid user namespaces: name, the forbidding value, the remedy."""


CONTAINER_REMEDY = (
    "in a container: start it with --privileged, or with --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined --cap-add SYS_ADMIN; elsewhere: run composer doctor"
)


def check(label: str, trial: Callable[[], Awaitable[None]]) -> list[Finding]:
    """Look at the kernel's settings and control groups, then start a real sandbox.

    Args:
        label: of the run.
        trial: starts and stops one sandbox; a `ComposerError` from it is a finding.
    """
    return [
        namespaces(),
        control_groups(label),
        try_out(
            trial, f"a bubblewrap sandbox starts (as {'root' if os.geteuid() == 0 else 'a user'})", CONTAINER_REMEDY
        ),
    ]


def namespaces(proc_sys: Path = Path("/proc/sys")) -> Finding:
    """Whether a sysctl forbids user namespaces."""
    for name, forbids, remedy in _SYSCTLS:
        file = proc_sys / name.replace(".", "/")
        if file.exists() and file.read_text().strip() == forbids:
            return Finding(
                "user namespaces",
                False,
                f"{name}={forbids} forbids them, so no sandbox can start",
                f"as root: {remedy}",
            )
    return Finding("user namespaces", True, "no kernel setting forbids them")


def control_groups(label: str) -> Finding:
    """Whether memory and processes are limited by the kernel or watched by us."""
    try:
        groups = ControlGroups.find(f"composer.{label}")
    except LimitError as e:
        return Finding(
            "control groups",
            False,
            "not writable: memory_bytes is watched instead of enforced by the kernel, "
            "which a program may overshoot for some milliseconds",
            str(e),
            required=False,
        )
    return Finding("control groups", True, f"sandboxes' memory and processes are limited in {groups.folders[0].parent}")
