"""The seccomp profile of containers beside bubblewrap's filter: one refuses what the other does."""

from __future__ import annotations

import json

import pytest

from envs.sandbox.docker.system_calls import profile
from envs.sandbox.seccomp import REFUSED


def allowed(name: str, *arguments: int) -> bool:
    """What the kernel would do, with the rules as docs.docker.com describes them."""
    meets = {
        "SCMP_CMP_EQ": lambda found, rule: found == rule["value"],
        "SCMP_CMP_LE": lambda found, rule: found <= rule["value"],
        "SCMP_CMP_MASKED_EQ": lambda found, rule: found & rule["value"] == rule["valueTwo"],
    }
    fields = json.loads(profile())
    assert fields["defaultAction"] == "SCMP_ACT_ERRNO"
    return any(
        name in rule["names"]
        and rule["action"] == "SCMP_ACT_ALLOW"
        and all(meets[arg["op"]](arguments[arg["index"]], arg) for arg in rule.get("args", []))
        for rule in fields["syscalls"]
    )


def test_what_bubblewrap_refuses_is_refused() -> None:
    assert not [name for name in REFUSED if allowed(name, 0, 0)]
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "ptrace", "bpf", "mount"} <= set(REFUSED)


def test_what_programs_use_is_allowed() -> None:
    for name in ("read", "openat", "mmap", "execve", "fork", "futex", "epoll_wait", "ioctl", "newfstatat", "wait4"):
        assert allowed(name), name


@pytest.mark.parametrize(
    ("name", "arguments", "is_allowed"),
    [
        ("clone", (0x3D0F00,), True),  # of a thread
        ("clone", (0x10000011,), False),  # into a new user namespace
        ("clone", (0x00020011,), False),  # into a new mount namespace
        ("clone3", (), False),
        ("personality", (0,), True),
        ("personality", (0xFFFFFFFF,), True),
        ("personality", (0x0040000,), False),  # without random addresses
        ("socket", (1, 1), True),
        ("socket", (2, 1), True),
        ("socket", (40, 1), False),  # AF_VSOCK
        ("shmget", (0, 4096), True),
        ("shmget", (0, 4097), False),
        ("semget", (0, 33), False),
    ],
)
def test_calls_by_their_arguments(name: str, arguments: tuple[int, ...], is_allowed: bool) -> None:
    assert allowed(name, *arguments) is is_allowed


def test_no_call_is_named_twice() -> None:
    [names, *_] = [rule["names"] for rule in json.loads(profile())["syscalls"]]
    assert len(names) == len(set(names)) > 250
