"""Which containers are refused: each limit on its own, with control groups of both versions and with hidden ones."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from envs.sandbox.docker import checks, system_calls
from envs.sandbox.docker.container import Settings
from envs.sandbox.docker.verify import check_container, check_inside
from envs.sandbox.realism.load import load_profile
from envs.sandbox.realism.profile import Profile

MIB = 2**20
LIMITS = SandboxLimits(memory_bytes=64 * MIB + 5, num_processes=10, file_bytes=MIB, disk_bytes=16 * MIB, cpu_seconds=7)
PLAIN = Settings("/home/dev/project", Profile())
HIDING = Settings("/home/dev/project", load_profile("developer"))
WHOLE = str(64 * MIB)
"""Of the memory, in pages of 4096 bytes."""
PIDS = "22"
"""10 of the sandbox's, 4 of the backend's, 8 for the engine's start of a program."""
V1 = f"memory/memory.limit_in_bytes {WHOLE}\nmemory/memory.memsw.limit_in_bytes {WHOLE}\npids/pids.max {PIDS}\n"
V2 = f"memory.max {WHOLE}\nmemory.swap.max 0\npids.max {PIDS}\n"
STATUS = """Name:\tcat
Uid:\t1000\t1000\t1000\t1000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t0000000000000020
CapAmb:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
"""
RLIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              7                    8                    seconds
Max file size             1048576              1048576              bytes
Max open files            1024                 1024                 files
"""
# An eighth of 16 MiB is shared memory, a quarter /tmp, the rest the home directory.
MOUNTS = """overlay / overlay ro,relatime 0 0
tmpfs /home/dev tmpfs rw,nosuid,nodev,relatime,size=10240k,nr_inodes=2560 0 0
tmpfs /tmp tmpfs rw,nosuid,nodev,relatime,size=4096k 0 0
shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=2048k 0 0
"""
MEMBER_V1 = "8:pids:/\n4:memory:/\n2:cpu,cpuacct:/elsewhere\n1:name=systemd:/\n0::/beside\n"
MEMBER_V2 = "0::/\n"
NETWORK = "Inter-| Receive\n face |bytes\n    lo: 0 0\n"


def shown(groups: str, swap: int = 0, **changes: str) -> bytes:
    membership = MEMBER_V2 if "memory.max" in groups else MEMBER_V1
    whole = {"status": STATUS, "rlimits": RLIMITS, "mounts": MOUNTS, "network": NETWORK, "membership": membership}
    parts = whole | changes
    return "==\n".join([*parts.values(), f"{groups}SwapTotal: {swap}\ntools yes\nbash yes\n"]).encode()


@pytest.mark.parametrize("swap", [0, 1024])
@pytest.mark.parametrize("groups", [V1, V2])
def test_limits_that_hold(groups: str, swap: int) -> None:
    assert check_inside(shown(groups, swap), PLAIN, LIMITS, LIMITS.memory_bytes)


def test_a_machine_without_swap_need_not_count_it() -> None:
    assert check_inside(shown(V1.replace("memory/memory.memsw", "other")), PLAIN, LIMITS, -1)
    assert check_inside(shown(V2.replace("memory.swap.max", "other")), PLAIN, LIMITS, -1)


@pytest.mark.parametrize(
    ("groups", "swap", "memory_swap", "name"),
    [
        (V1.replace(f"limit_in_bytes {WHOLE}", "limit_in_bytes 9223372036854771712", 1), 0, 0, "memory.limit_in_bytes"),
        (V1.replace(f"pids.max {PIDS}", "pids.max max"), 0, 0, "pids.max"),
        (V1.replace("pids/pids.max", "other"), 0, 0, "pids.max"),
        (V1.replace("memory/memory.memsw", "other"), 1024, LIMITS.memory_bytes, "memory.memsw.limit_in_bytes"),
        (V1, 1024, -1, "memory and swap"),
        (V2.replace(WHOLE, "max"), 0, 0, "memory.max"),
        (V2.replace(f"pids.max {PIDS}", "pids.max max"), 0, 0, "pids.max"),
        (V2.replace("pids.max", "other"), 0, 0, "pids.max"),
        (V2.replace("swap.max 0", "swap.max max"), 1024, LIMITS.memory_bytes, "memory.swap.max"),
        (V2.replace("memory.swap.max", "other"), 1024, LIMITS.memory_bytes, "memory.swap.max"),
        # No control group in sight.
        ("", 0, LIMITS.memory_bytes, "memory.limit_in_bytes"),
    ],
)
def test_a_limit_that_does_not_hold(groups: str, swap: int, memory_swap: int, name: str) -> None:
    with pytest.raises(SandboxStartError, match=f"the limit {name}="):
        check_inside(shown(groups, swap), PLAIN, LIMITS, memory_swap)


def test_hidden_groups_are_looked_at_in_a_twin() -> None:
    pids = str(int(PIDS) + len(HIDING.profile.processes))
    twin = replace(HIDING, is_twin=True)
    assert HIDING.hides_groups and not twin.hides_groups and not PLAIN.hides_groups
    assert check_inside(shown(""), HIDING, LIMITS, LIMITS.memory_bytes)
    assert check_inside(shown(V2.replace(f"pids.max {PIDS}", f"pids.max {pids}")), twin, LIMITS, LIMITS.memory_bytes)
    with pytest.raises(SandboxStartError, match="memory.limit_in_bytes"):
        check_inside(shown(""), twin, LIMITS, LIMITS.memory_bytes)
    # Swap is in the engine's books.
    with pytest.raises(SandboxStartError, match="memory and swap"):
        check_inside(shown("", 1024), HIDING, LIMITS, -1)


@pytest.mark.parametrize(
    ("part", "old", "new", "why"),
    [
        ("status", "1000\t1000\t1000", "0\t0\t0", "user is not 1000"),
        ("status", "CapEff:\t0000000000000000", "CapEff:\t0000000000000020", "CapEff"),
        ("status", "NoNewPrivs:\t1", "NoNewPrivs:\t0", "gain privileges"),
        ("status", "Seccomp:\t2", "Seccomp:\t0", "no seccomp filter"),
        ("rlimits", "1048576  ", "unlimited", "Max file size"),
        ("rlimits", "7  ", "9  ", "Max cpu time"),
        ("mounts", "ro,relatime", "rw,relatime", "root directory can be written"),
        ("mounts", "size=4096k", "size=8192k", "disk_bytes does not hold"),
        ("mounts", "/home/dev tmpfs", "/home/dev ext4", "disk_bytes does not hold"),
        ("network", "lo: 0 0", "lo: 0 0\n  eth0: 0 0", "has a network: lo, eth0"),
    ],
)
def test_anything_else_that_is_missing(part: str, old: str, new: str, why: str) -> None:
    before = {"status": STATUS, "rlimits": RLIMITS, "mounts": MOUNTS, "network": NETWORK}[part]
    assert old in before
    with pytest.raises(SandboxStartError, match=why):
        check_inside(shown(V2, **{part: before.replace(old, new, 1)}), PLAIN, LIMITS, LIMITS.memory_bytes)


@pytest.mark.parametrize(
    ("groups", "membership", "path"),
    [
        (V1, MEMBER_V1.replace("pids:/", "pids:/../other"), "/../other"),
        (V1, MEMBER_V1.replace("memory:/", "memory:/below"), "/below"),
        (V1, "5:memory,pids:/x:y\n0::/\n", "/x:y"),
        (V2, "0::/../../init.scope\n", "/../../init.scope"),
        (V2, "", "none"),
    ],
)
def test_a_program_that_is_not_in_its_containers_group(groups: str, membership: str, path: str) -> None:
    with pytest.raises(SandboxStartError, match=f"another control group than the container: {path}"):
        check_inside(shown(groups, membership=membership), PLAIN, LIMITS, LIMITS.memory_bytes)


CONTAINER: dict[str, Any] = {
    "HostConfig": {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "Memory": LIMITS.memory_bytes,
        "PidsLimit": int(PIDS),
        "CgroupnsMode": "private",
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={system_calls.profile()}"],
    },
    "Mounts": [],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("NetworkMode", "default"),
        ("ReadonlyRootfs", False),
        ("Memory", 0),
        ("PidsLimit", None),
        ("CgroupnsMode", "host"),
        ("Privileged", True),
        ("CapDrop", None),
        ("SecurityOpt", None),
        ("SecurityOpt", ["no-new-privileges:true"]),
        ("SecurityOpt", ["no-new-privileges:true", "seccomp=unconfined"]),
    ],
)
def test_an_engine_that_keeps_to_something_else(key: str, value: Any) -> None:
    check_container(CONTAINER, PLAIN, LIMITS)
    container = copy.deepcopy(CONTAINER)
    container["HostConfig"][key] = value
    with pytest.raises(SandboxStartError):
        check_container(container, PLAIN, LIMITS)


@pytest.mark.parametrize("api", ["1.41", "1.44", "1.51"])
def test_engines_that_will_do(api: str) -> None:
    info = {"OSType": "linux", "SecurityOptions": ["name=seccomp,profile=builtin"], "MemoryLimit": True, "PidsLimit": 1}
    checks.refuse({"ApiVersion": api}, info)
    for wrong in (
        {"OSType": "windows"},
        {"SecurityOptions": ["name=seccomp,profile=unconfined"]},
        {"SecurityOptions": None},
        {"MemoryLimit": False},
        {"PidsLimit": False},
    ):
        with pytest.raises(SandboxStartError):
            checks.refuse({"ApiVersion": api}, info | wrong)


@pytest.mark.parametrize("api", ["1.24", "1.40", "0"])
def test_engines_that_are_too_old(api: str) -> None:
    info = {"OSType": "linux", "SecurityOptions": ["name=seccomp"], "MemoryLimit": True, "PidsLimit": True}
    with pytest.raises(SandboxStartError, match=f"version {api}, and sandboxes need 1.41"):
        checks.refuse({"ApiVersion": api}, info)
