"""The filter, run by an interpreter of classic BPF written for this test alone."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from envs.sandbox.seccomp import _SHARED_MEMORY, BOUNDED, REFUSED, build_filter

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM = 0x00050000 | errno.EPERM


def run(program: bytes, number: int, *arguments: int, arch: int = X86_64) -> int:
    """What the kernel would do with a call: interpret the program as linux/filter.h defines it."""
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, jump_true, jump_false, k = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x45: bool(accumulator & k), 0x35: accumulator >= k}[code]
            at += jump_true if holds else jump_false


@pytest.fixture(scope="module")
def program() -> bytes:
    return build_filter("x86_64")


def test_ordinary_calls_pass(program: bytes) -> None:
    # read, write, open, close, stat, mmap, fork, execve, exit, kill, openat, futex, clone of a thread
    for number in (0, 1, 2, 3, 4, 9, 57, 59, 60, 62, 257, 202):
        assert run(program, number) == ALLOW
    assert run(program, 56, 0x3D0F00) == ALLOW
    refused = {numbers[0] for numbers in REFUSED.values()} | {56, 435, 16, 135, 41}
    assert all(run(program, number) == ALLOW for number in range(470) if number not in refused)


def test_refused_calls(program: bytes) -> None:
    # ptrace, mount, init_module, bpf, unshare, setns, io_uring_setup, keyctl
    for number in (101, 165, 175, 321, 272, 308, 425, 250):
        assert run(program, number, 1, 2, 3) == EPERM


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_into_a_new_namespace_is_refused(program: bytes, flag: int) -> None:
    assert run(program, 56, flag | 17) == EPERM


def test_arguments_decide_about_some_calls(program: bytes) -> None:
    assert run(program, 435) == 0x00050000 | errno.ENOSYS
    assert run(program, 16, 0, 0x5401) == ALLOW  # ioctl TCGETS
    assert run(program, 16, 0, 0x5412) == EPERM  # TIOCSTI
    assert run(program, 16, 0, 0xFFFFFFFF_00005412) == EPERM
    assert run(program, 135, 0) == run(program, 135, 0xFFFFFFFF) == ALLOW
    assert run(program, 135, 0x0040000) == EPERM  # ADDR_NO_RANDOMIZE
    assert run(program, 41, 1) == run(program, 41, 2) == run(program, 41, 10) == ALLOW
    assert run(program, 41, 40) == run(program, 41, 17) == 0x00050000 | errno.EAFNOSUPPORT  # VSOCK, PACKET


def test_other_abis_are_killed(program: bytes) -> None:
    assert run(program, 1, arch=I386) == KILL
    assert run(program, 0x40000001) == KILL
    assert run(build_filter("aarch64"), 64, arch=X86_64) == KILL


def test_aarch64_has_its_own_numbers() -> None:
    program = build_filter("aarch64")
    assert run(program, 64, arch=AARCH64) == ALLOW  # write
    assert run(program, 117, arch=AARCH64) == EPERM  # ptrace
    assert run(program, 101, arch=AARCH64) == ALLOW  # nanosleep there, ptrace on x86_64
    assert run(program, 220, 0x10000011, arch=AARCH64) == EPERM
    assert run(program, 198, 40, arch=AARCH64) == 0x00050000 | errno.EAFNOSUPPORT


def test_shared_memory_is_refused_where_nothing_counts_it(program: bytes) -> None:
    strict = build_filter("x86_64", shared_memory=False)
    for number in (319, 29):  # memfd_create, shmget
        assert run(program, number) == ALLOW
        assert run(strict, number) == EPERM


def test_what_outlives_its_process_is_small(program: bytes) -> None:
    for number, most in ((29, 4096), (64, 32)):  # shmget, semget
        assert run(program, number, 0, most) == ALLOW
        assert run(program, number, 0, most + 1) == run(program, number, 0, 1 << 32) == EPERM
    assert run(program, 68, 0, 0) == EPERM  # msgget
    assert run(build_filter("aarch64"), 194, 0, 4097, arch=AARCH64) == EPERM


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match="'riscv64'"):
        build_filter("riscv64")


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0),
        ("/usr/include/asm-generic/unistd.h", 1),
    ],
)
def test_numbers_are_those_of_the_kernels_headers(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    for name, numbers in (REFUSED | _SHARED_MEMORY | {name: two for name, (two, _) in BOUNDED.items()}).items():
        if name in defined:
            assert numbers[column] == int(defined[name]), name
