"""What a container is made with. Whether the engine has done so is seen in verify.py.

    memory_bytes    control group of the container, its files in memory included; swap none
    num_processes   control group; the backend's own come on top, with room for what the engine starts a program by
    file_bytes      RLIMIT_FSIZE of every process
    disk_bytes      the sizes of the places that can be written to, which add up to it
    cpu_seconds     RLIMIT_CPU of every process
    lifetime_s      the container's first process, which sleeps for so long and ends it, whoever has forgotten it
    exec_timeout_s, output_bytes    commands.py

The image's own file system is read-only, and what can be written to are file systems in memory (tmpfs): the home
directory with the working directory, /tmp, /dev/shm and what the backend's `writable` names. Most engines (overlay2 on
ext4) cannot bound a writable layer at all, and one that is watched has overflowed before anybody looks. In memory the
kernel refuses the first byte too many on every engine alike, nothing is left on a disk, and a snapshot is an archive of
a few folders. The price: it counts as memory, so that `disk_bytes` is half of `memory_bytes` at most, and each place
has a size of its own.

The container keeps one capability of all, CAP_KILL, so that its root, who is the backend's control shell, can end
what the sandbox's user runs. That user has none and can gain none: he is not root, and no new privileges are given.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

import docker
from docker.types import Ulimit

from composer.contract import SandboxLimits
from envs.sandbox.docker import scenery, system_calls
from envs.sandbox.limits_check import LEAST_DISK_BYTES
from envs.sandbox.realism.profile import Profile

UID = 1000
OVERHEAD_PROCESSES = 4
"""The first process, the sleeping one, the control shell and the helper shell."""
_EXEC_PROCESSES = 8
"""Threads of the engine's own that are in the container while it starts a program there."""
OPEN_FILES = 1024
PAGE_BYTES = 4096
CERTIFICATES = "/etc/ssl/certs"
"""In a sandbox with a network a file system in memory, which root alone can write to: with the proxy's in it."""
_CERTIFICATES_BYTES = 2**22
_SHARED_MEMORY = "/dev/shm"
_TMP = "/tmp"


@dataclass(frozen=True)
class Settings:
    """What all sandboxes of a backend have in common."""

    workdir: str
    profile: Profile
    writable: tuple[str, ...] = ()
    """Further folders that the user can write to."""
    is_twin: bool = False
    """Its control groups are to be seen, whatever the profile hides."""

    @property
    def hides_groups(self) -> bool:
        """Whether /sys is the profile's, so that the control groups are out of sight."""
        return not self.is_twin and scenery.covers_sys(self.profile)

    @property
    def user(self) -> str:
        """Its name."""
        return self.profile.user

    @property
    def home(self) -> str:
        """The user's home directory."""
        return f"/home/{self.user}"

    def places(self, disk_bytes: int) -> dict[str, int]:
        """Folder -> bytes of the file systems that can be written to; together no more than `disk_bytes`."""
        shared, tmp, each = disk_bytes // 8, disk_bytes // 4, disk_bytes // 16
        rest = disk_bytes - shared - tmp - each * len(self.writable)
        if is_below(self.workdir, self.home):
            sizes = {self.home: rest}
        elif is_below(self.home, self.workdir):
            sizes = {self.workdir: rest}
        else:
            sizes = {self.workdir: rest - disk_bytes // 8, self.home: disk_bytes // 8}
        sizes |= dict.fromkeys(self.writable, each) | {_TMP: tmp, _SHARED_MEMORY: shared}
        return {place: size // PAGE_BYTES * PAGE_BYTES for place, size in sizes.items()}

    @property
    def kept_places(self) -> list[str]:
        """The folders that a snapshot holds."""
        return [place for place in self.places(LEAST_DISK_BYTES) if place != _SHARED_MEMORY]

    @property
    def environment(self) -> dict[str, str]:
        """Variables on top of the image's."""
        named = {"HOME": self.home, "USER": self.user, "LOGNAME": self.user, "TERM": self.profile.term}
        return named | {"LANG": self.profile.locale}

    def num_pids(self, limits: SandboxLimits) -> int:
        """Processes that the container may have, the backend's own among them."""
        return limits.num_processes + OVERHEAD_PROCESSES + _EXEC_PROCESSES + len(self.profile.processes)


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return posixpath.commonpath([path, folder]) == posixpath.normpath(folder)


def create(
    client: docker.APIClient,
    image: str,
    name: str,
    settings: Settings,
    limits: SandboxLimits,
    labels: dict[str, str],
    trusted: Mapping[str, str] | None = None,
) -> list[str]:
    """Make a container, which does not run yet, and return the engine's warnings.

    One that is to have a network has `trusted`: variables that say where its certificates are.
    """
    rlimits = {
        "core": (0, 0),
        "fsize": (limits.file_bytes, limits.file_bytes),
        # At the first a program gets SIGXCPU, which it may catch; a second later comes SIGKILL.
        "cpu": (limits.cpu_seconds, limits.cpu_seconds + 1),
        "nofile": (OPEN_FILES, OPEN_FILES),
    }
    places = settings.places(limits.disk_bytes)
    shared = places.pop(_SHARED_MEMORY)
    options = f"rw,exec,nosuid,nodev,uid={UID},gid={UID}"
    modes = {_TMP: "1777"}
    tmpfs = {
        place: f"{options},mode={modes.get(place, '0755')},size={size},nr_inodes={size // PAGE_BYTES}"
        for place, size in places.items()
    }
    if trusted is not None:
        tmpfs[CERTIFICATES] = f"rw,noexec,nosuid,nodev,uid=0,gid=0,mode=0755,size={_CERTIFICATES_BYTES},nr_inodes=4096"
    host_config = client.create_host_config(
        network_mode="none",
        ipc_mode="private",
        cgroupns="private",
        read_only=True,
        auto_remove=True,
        cap_drop=["ALL"],
        cap_add=["KILL"],
        security_opt=["no-new-privileges:true", f"seccomp={system_calls.profile()}"],
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        pids_limit=settings.num_pids(limits),
        ulimits=[Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in rlimits.items()],
        tmpfs=tmpfs | (scenery.TMPFS if settings.hides_groups else {}),
        # Otherwise the engine's own name servers and domains would be seen.
        dns=["127.0.0.53"],
        dns_search=["."],
        shm_size=shared,
        log_config={"Type": "none"},
    )
    made = client.create_container(
        image,
        entrypoint=[scenery.first_program(settings.profile)],
        command=scenery.first_arguments(math.ceil(limits.lifetime_s)),
        name=name,
        hostname=settings.profile.hostname,
        user="0:0",
        working_dir="/",
        environment=settings.environment | dict(trusted or {}),
        labels=labels,
        healthcheck={"test": ["NONE"]},
        host_config=host_config,
        use_config_proxy=False,
    )
    return list(made.get("Warnings") or [])
