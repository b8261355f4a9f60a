"""What a container is made with, and whether the engine has done so: a limit that is not there stops the start.

    memory_bytes    control group of the container, its files in memory included; swap none
    num_processes   control group; the backend's own come on top, with room for what the engine starts a program by
    file_bytes      RLIMIT_FSIZE of every process
    disk_bytes      the sizes of the places that can be written to, which add up to it
    cpu_seconds     RLIMIT_CPU of every process
    lifetime_s      the container's first process, which sleeps for so long and ends it, whoever has forgotten it
    exec_timeout_s, output_bytes    sandbox.py

The image's own file system is read-only, and what can be written to are file systems in memory (tmpfs): the home
directory with the working directory, /tmp and /dev/shm. Most engines (overlay2 on ext4) cannot bound a writable layer
at all, and one that is watched has overflowed before anybody looks. In memory the kernel refuses the first byte too
many on every engine alike, nothing is left on a disk, and a snapshot is an archive of a few folders. The price: it
counts as memory, and each place has a size of its own.

The container keeps one capability of all, CAP_KILL, so that its root, who is the backend's control shell, can end
what the sandbox's user runs. That user has none and can gain none: he is not root, and no new privileges are given.
"""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass
from typing import Any

import docker
from docker.types import Ulimit

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError

UID = 1000
OVERHEAD_PROCESSES = 4
"""The first process, the sleeping one, the control shell and the helper shell."""
_EXEC_PROCESSES = 8
"""Threads of the engine's own that are in the container while it starts a program there."""
_OPEN_FILES = 1024
_LEAST_MEMORY_BYTES = 32 * 2**20
_LEAST_DISK_BYTES = 2**20
_PAGE_BYTES = 4096
_SHARED_MEMORY = "/dev/shm"
_TMP = "/tmp"


@dataclass(frozen=True)
class Settings:
    """What all sandboxes of a backend have in common."""

    workdir: str
    user: str
    hostname: str

    @property
    def home(self) -> str:
        """The user's home directory."""
        return f"/home/{self.user}"

    def places(self, disk_bytes: int) -> dict[str, int]:
        """Folder -> bytes of the file systems that can be written to; together no more than `disk_bytes`."""
        shared, tmp = disk_bytes // 8, disk_bytes // 4
        rest = disk_bytes - shared - tmp
        if is_below(self.workdir, self.home):
            sizes = {self.home: rest}
        elif is_below(self.home, self.workdir):
            sizes = {self.workdir: rest}
        else:
            sizes = {self.workdir: rest - disk_bytes // 8, self.home: disk_bytes // 8}
        sizes |= {_TMP: tmp, _SHARED_MEMORY: shared}
        return {place: size // _PAGE_BYTES * _PAGE_BYTES for place, size in sizes.items()}

    @property
    def kept_places(self) -> list[str]:
        """The folders that a snapshot holds."""
        return [place for place in self.places(_LEAST_DISK_BYTES) if place != _SHARED_MEMORY]

    @property
    def environment(self) -> dict[str, str]:
        """Variables on top of the image's."""
        return {"HOME": self.home, "USER": self.user, "LOGNAME": self.user, "TERM": "dumb"}


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return posixpath.commonpath([path, folder]) == posixpath.normpath(folder)


def check_limits(limits: SandboxLimits) -> None:
    """Refuse limits that no sandbox can work with.

    Raises:
        SandboxStartError: one of them is too small, or the disk takes too much of the memory.
    """
    for name, least in (
        ("memory_bytes", _LEAST_MEMORY_BYTES),
        ("disk_bytes", _LEAST_DISK_BYTES),
        ("num_processes", 1),
        ("file_bytes", 1),
        ("cpu_seconds", 1),
        ("output_bytes", 1),
    ):
        if (value := getattr(limits, name)) < least:
            raise SandboxStartError(f"{name}={value} is too small for a sandbox: at least {least}")
    if limits.disk_bytes > limits.memory_bytes // 2:
        raise SandboxStartError(
            f"disk_bytes={limits.disk_bytes} lies in memory, with what runs: at most half of "
            f"memory_bytes={limits.memory_bytes}"
        )
    for name in ("exec_timeout_s", "lifetime_s"):
        if not getattr(limits, name) > 0:
            raise SandboxStartError(f"{name}={getattr(limits, name)} must be above 0")


def create(
    client: docker.APIClient, image: str, name: str, settings: Settings, limits: SandboxLimits, labels: dict[str, str]
) -> list[str]:
    """Make a container, which does not run yet, and return the engine's warnings."""
    rlimits = {
        "core": (0, 0),
        "fsize": (limits.file_bytes, limits.file_bytes),
        # At the first a program gets SIGXCPU, which it may catch; a second later comes SIGKILL.
        "cpu": (limits.cpu_seconds, limits.cpu_seconds + 1),
        "nofile": (_OPEN_FILES, _OPEN_FILES),
    }
    places = settings.places(limits.disk_bytes)
    shared = places.pop(_SHARED_MEMORY)
    options = f"rw,exec,nosuid,nodev,uid={UID},gid={UID}"
    modes = {_TMP: "1777"}
    host_config = client.create_host_config(
        network_mode="none",
        ipc_mode="private",
        cgroupns="private",
        read_only=True,
        init=True,
        auto_remove=True,
        cap_drop=["ALL"],
        cap_add=["KILL"],
        security_opt=["no-new-privileges:true"],
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        pids_limit=limits.num_processes + OVERHEAD_PROCESSES + _EXEC_PROCESSES,
        ulimits=[Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in rlimits.items()],
        tmpfs={
            place: f"{options},mode={modes.get(place, '0755')},size={size},nr_inodes={size // _PAGE_BYTES}"
            for place, size in places.items()
        },
        shm_size=shared,
        log_config={"Type": "none"},
    )
    made = client.create_container(
        image,
        entrypoint=["/bin/sh", "-c"],
        command=[f'exec "$(command -v sleep)" {math.ceil(limits.lifetime_s)}'],
        name=name,
        hostname=settings.hostname,
        user="0:0",
        working_dir="/",
        environment=settings.environment,
        labels=labels,
        healthcheck={"test": ["NONE"]},
        host_config=host_config,
        use_config_proxy=False,
    )
    return list(made.get("Warnings") or [])


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
        "PidsLimit": limits.num_processes + OVERHEAD_PROCESSES + _EXEC_PROCESSES,
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
for f in memory.max memory.swap.max pids.max \
    memory/memory.limit_in_bytes memory/memory.memsw.limit_in_bytes pids/pids.max
do [ -r /sys/fs/cgroup/$f ] && echo "$f $(cat /sys/fs/cgroup/$f)"; done
while read -r n v u; do [ "$n" = SwapTotal: ] && echo "$n $v"; done </proc/meminfo
command -v tar >/dev/null && command -v dd >/dev/null && command -v head >/dev/null && echo tools yes
command -v bash >/dev/null && echo bash yes
"""
"""Run by the sandbox's user before anything else, it shows what holds for him."""


def check_inside(shown: bytes, settings: Settings, limits: SandboxLimits) -> bool:
    """Compare what `INSIDE` printed with what was asked for.

    Returns:
        Whether there is a bash.

    Raises:
        SandboxStartError: a limit does not hold in the container, or its image lacks a program.
    """
    parts = shown.decode(errors="replace").split("==\n")
    if len(parts) != 5:
        raise SandboxStartError(f"the container does not show its limits: {shown[-200:]!r}")
    status, rlimits, mounts, network, rest = parts
    values = dict(line.split(None, 1) for line in rest.splitlines() if " " in line)
    if values.get("tools") != "yes":
        raise SandboxStartError("the image lacks tar, dd or head: take one with coreutils and tar, or with busybox")
    _check_status(dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line))
    for title, value in (
        ("Max file size", limits.file_bytes),
        ("Max cpu time", limits.cpu_seconds),
        ("Max open files", _OPEN_FILES),
    ):
        found = re.search(rf"^{title} +(\S+)", rlimits, re.MULTILINE)
        _expect(title, found and found[1], str(value))
    # Kept in whole pages.
    memory = str(limits.memory_bytes // _PAGE_BYTES * _PAGE_BYTES)
    processes = str(limits.num_processes + OVERHEAD_PROCESSES + _EXEC_PROCESSES)
    has_swap = values.get("SwapTotal:", "1").split()[0] != "0"
    if "memory.max" in values:
        _expect("memory.max", values["memory.max"], memory)
        _expect("pids.max", values.get("pids.max"), processes)
        if has_swap or "memory.swap.max" in values:
            _expect("memory.swap.max", values.get("memory.swap.max"), "0")
    else:
        _expect("memory.limit_in_bytes", values.get("memory/memory.limit_in_bytes"), memory)
        _expect("pids.max", values.get("pids/pids.max"), processes)
        if has_swap or "memory/memory.memsw.limit_in_bytes" in values:
            _expect("memory.memsw.limit_in_bytes", values.get("memory/memory.memsw.limit_in_bytes"), memory)
    _check_mounts(mounts, settings.places(limits.disk_bytes))
    interfaces = [line.split(":")[0].strip() for line in network.splitlines()[2:]]
    if interfaces not in ([], ["lo"]):
        raise SandboxStartError(f"the container has a network: {', '.join(interfaces)}")
    return values.get("bash") == "yes"


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
