"""Whether a container is what was asked for: a limit that does not hold stops the start.

Two are asked, and neither is believed for the other: what the engine says that the container is made with, and what
the sandbox's user sees in it. Where a profile hides the control groups from him, a twin of the first container with
these limits is looked into, which hides nothing and is gone before the first starts.
"""

from __future__ import annotations

import re
from typing import Any

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from envs.sandbox.docker import system_calls
from envs.sandbox.docker.container import OPEN_FILES, PAGE_BYTES, UID, Settings


def check_container(inspected: dict[str, Any], settings: Settings, limits: SandboxLimits) -> None:
    """Compare what the engine says of a running container with what was asked for.

    Raises:
        SandboxStartError: something is missing.
    """
    config = inspected["HostConfig"]
    wanted = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "Memory": limits.memory_bytes,
        "PidsLimit": settings.num_pids(limits),
        "CgroupnsMode": "private",
        "Privileged": False,
    }
    for key, value in wanted.items():
        if config.get(key) != value:
            raise SandboxStartError(
                f"the Docker engine did not keep to {key}={value}: the container has {config.get(key)}"
            )
    if config.get("CapDrop") != ["ALL"] or not any("no-new-privileges" in o for o in config.get("SecurityOpt") or []):
        raise SandboxStartError("the Docker engine did not take the container's privileges away")
    if f"seccomp={system_calls.profile()}" not in config["SecurityOpt"]:
        raise SandboxStartError("the Docker engine did not keep to the seccomp profile that it was given")
    volumes = [mount["Destination"] for mount in inspected.get("Mounts") or [] if mount.get("Type") != "tmpfs"]
    if volumes:
        raise SandboxStartError(
            f"the image declares VOLUME {' '.join(volumes)}, which nothing bounds: build it without"
        )


INSIDE = rb"""
cat /proc/self/status; echo ==
cat /proc/self/limits; echo ==
cat /proc/self/mounts; echo ==
cat /proc/net/dev; echo ==
cat /proc/self/cgroup; echo ==
for f in memory.max memory.swap.max pids.max \
    memory/memory.limit_in_bytes memory/memory.memsw.limit_in_bytes pids/pids.max
do [ -r /sys/fs/cgroup/$f ] && echo "$f $(cat /sys/fs/cgroup/$f)"; done
while read -r n v u; do [ "$n" = SwapTotal: ] && echo "$n $v"; done </proc/meminfo
command -v tar >/dev/null && command -v dd >/dev/null && command -v head >/dev/null && echo tools yes
command -v bash >/dev/null && echo bash yes
"""
"""Run by the sandbox's user before anything else, it shows what holds for him."""


def check_inside(shown: bytes, settings: Settings, limits: SandboxLimits, memory_swap: int | None) -> bool:
    """Compare what `INSIDE` printed with what was asked for.

    Args:
        shown: by `INSIDE`.
        settings: of the backend.
        limits: of the sandbox.
        memory_swap: bytes of memory and swap that the container has in the engine's books.

    Returns:
        Whether there is a bash.

    Raises:
        SandboxStartError: a limit does not hold in the container, or its image lacks a program.
    """
    parts = shown.decode(errors="replace").split("==\n")
    if len(parts) != 6:
        raise SandboxStartError(f"the container does not show its limits: {shown[-200:]!r}")
    status, rlimits, mounts, network, membership, rest = parts
    values = dict(line.split(None, 1) for line in rest.splitlines() if " " in line)
    if values.get("tools") != "yes":
        raise SandboxStartError("the image lacks tar, dd or head: take one with coreutils and tar, or with busybox")
    _check_status(dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line))
    for title, value in (
        ("Max file size", limits.file_bytes),
        ("Max cpu time", limits.cpu_seconds),
        ("Max open files", OPEN_FILES),
    ):
        found = re.search(rf"^{title} +(\S+)", rlimits, re.MULTILINE)
        _expect(title, found and found[1], str(value))
    _check_membership(membership)
    _check_groups(values, settings, limits, memory_swap)
    _check_mounts(mounts, settings.places(limits.disk_bytes))
    interfaces = [line.split(":")[0].strip() for line in network.splitlines()[2:]]
    if interfaces not in ([], ["lo"]):
        raise SandboxStartError(f"the container has a network: {', '.join(interfaces)}")
    return values.get("bash") == "yes"


def _check_membership(membership: str) -> None:
    """A program that the engine starts later has to be where the limits are: at the top of its own namespace."""
    rows = [line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2]
    limiting = [path for _, names, path in rows if {"memory", "pids"} & set(names.split(","))]
    # Version 2 has one line, without names; beside version 1 it limits nothing.
    for path in limiting or [path for _, names, path in rows if not names] or ["none"]:
        if path != "/":
            raise SandboxStartError(
                f"a program in the container is in another control group than the container: {path}"
            )


def _check_groups(values: dict[str, str], settings: Settings, limits: SandboxLimits, memory_swap: int | None) -> None:
    """Control groups of either version, where they are in sight; swap, wherever the machine has some."""
    memory, processes = str(_whole_pages(limits.memory_bytes)), str(settings.num_pids(limits))
    has_swap = values.get("SwapTotal:", "1").split()[0] != "0"
    if has_swap:
        _expect("memory and swap", _text(memory_swap), str(limits.memory_bytes))
    if "memory.max" in values and not settings.hides_groups:
        _expect("memory.max", values["memory.max"], memory)
        _expect("pids.max", values.get("pids.max"), processes)
        if has_swap or "memory.swap.max" in values:
            _expect("memory.swap.max", values.get("memory.swap.max"), "0")
    elif not settings.hides_groups:
        _expect("memory.limit_in_bytes", values.get("memory/memory.limit_in_bytes"), memory)
        _expect("pids.max", values.get("pids/pids.max"), processes)
        if has_swap or "memory/memory.memsw.limit_in_bytes" in values:
            _expect("memory.memsw.limit_in_bytes", values.get("memory/memory.memsw.limit_in_bytes"), memory)


def _whole_pages(num_bytes: int) -> int:
    """Memory is kept in whole pages."""
    return num_bytes // PAGE_BYTES * PAGE_BYTES


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _expect(name: str, found: str | None, wanted: str) -> None:
    if found is None or found.strip() != wanted:
        raise SandboxStartError(
            f"the limit {name}={wanted} does not hold in the container, which has {found}: "
            "does the engine's kernel have the control groups memory and pids, with swap accounting?"
        )


def _check_status(status: dict[str, str]) -> None:
    if status.get("Uid", "").split() != [str(UID)] * 4:
        raise SandboxStartError(f"the sandbox's user is not {UID} in the container: {status.get('Uid')}")
    for name in ("CapPrm", "CapEff", "CapAmb"):
        if int(status.get(name, "1"), 16) != 0:
            raise SandboxStartError(f"the sandbox's user has capabilities in the container: {name} {status.get(name)}")
    if status.get("NoNewPrivs", "").strip() != "1":
        raise SandboxStartError("the sandbox's user can gain privileges in the container")
    if status.get("Seccomp", "").strip() != "2":
        raise SandboxStartError("no seccomp filter holds in the container: start the engine with its default profile")


def _check_mounts(mounts: str, places: dict[str, int]) -> None:
    found = {}
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split(" ")
        found[place] = (kind, options.split(","))
    if "ro" not in found.get("/", ("", ["rw"]))[1]:
        raise SandboxStartError("the container's root directory can be written to")
    for place, size in places.items():
        kind, options = found.get(place, ("", []))
        if kind != "tmpfs" or f"size={size // 1024}k" not in options:
            raise SandboxStartError(f"the limit disk_bytes does not hold in the container: {place} is {kind} {options}")
