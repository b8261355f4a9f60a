"""What `composer doctor` says about an engine's ability to run sandboxes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from composer.contract import Finding
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker.engine import LEAST_API, Engine
from envs.sandbox.trial import try_out


def check(engine: Engine, is_image_there: Callable[[], bool], trial: Callable[[], Awaitable[None]]) -> list[Finding]:
    """Ask the engine what it can do, then start a real sandbox.

    Args:
        engine: the engine.
        is_image_there: whether a sandbox can start without a pull.
        trial: starts and stops one sandbox; a `ComposerError` from it is a finding.
    """
    try:
        version = engine.call_now("say its version", lambda client: client.version())
        info = engine.call_now("describe itself", lambda client: client.info())
    except SandboxError as e:
        return [Finding("Docker engine", False, str(e), "start a Docker engine, and let this user use its socket")]
    there = Finding(
        "Docker engine",
        True,
        f"{version.get('Version')} at {engine.address}, control groups v{info.get('CgroupVersion')}",
    )
    findings = [there, *_of_info(version, info)]
    if not all(finding.ok for finding in findings):
        return findings
    if not is_image_there():
        detail = "the image is not on the engine yet and is pulled when the first sandbox starts, so none was tried"
        return [*findings, Finding("sandbox", True, detail, required=False)]
    return [
        *findings,
        try_out(
            trial,
            "a Docker sandbox starts and keeps its limits",
            "look at the engine's own log, and at the image's name",
        ),
    ]


def refuse(version: dict[str, Any], info: dict[str, Any]) -> None:
    """Refuse an engine that cannot keep a sandbox's limits.

    Raises:
        SandboxStartError: it lacks something, which is named with its remedy.
    """
    for finding in _of_info(version, info):
        if not finding.ok:
            raise SandboxStartError(f"{finding.name}: {finding.detail}; {finding.remedy}")


def _of_info(version: dict[str, Any], info: dict[str, Any]) -> list[Finding]:
    api = tuple(int(part) for part in str(version.get("ApiVersion", "0")).split("."))
    security = [str(option) for option in info.get("SecurityOptions") or []]
    seccomp = next((option for option in security if option.startswith("name=seccomp")), "")
    memory = bool(info.get("MemoryLimit")) and bool(info.get("PidsLimit"))
    has_seccomp = seccomp != "" and "unconfined" not in seccomp
    return [
        Finding(
            "Docker API",
            api >= LEAST_API,
            f"version {version.get('ApiVersion')}, and sandboxes need {'.'.join(map(str, LEAST_API))} (Docker 20.10)",
            "use a newer Docker engine",
        ),
        Finding(
            "operating system",
            info.get("OSType") == "linux",
            f"the engine runs containers for {info.get('OSType')}, and sandboxes need linux",
            "switch the engine to Linux containers",
        ),
        Finding(
            "seccomp",
            has_seccomp,
            f"the engine filters system calls ({seccomp})"
            if has_seccomp
            else "the engine does not filter system calls",
            "start dockerd without --seccomp-profile=unconfined, on a kernel with seccomp",
        ),
        Finding(
            "memory and process limits",
            memory,
            "the engine's kernel limits both" if memory else "the engine's kernel does not limit both",
            "turn the control groups memory and pids on: boot with cgroup_enable=memory, or with control groups v2",
        ),
    ]
