"""The seccomp filter: a classic BPF program, assembled here, that refuses what no program in a sandbox needs.

It is a deny list on top of the real walls (namespaces, no capabilities, no-new-privileges): its aim is to take the
kernel's riskiest code out of reach. Refused calls return an error instead of killing, so that programs that probe
for a feature go on without it.

Layout of `struct seccomp_data`, from linux/seccomp.h: nr (u32, offset 0), arch (u32, 4), instruction pointer (u64, 8),
args (6 x u64, from 16, little endian). Instruction encoding, from linux/filter.h: code u16, jt u8, jf u8, k u32.
System call numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_JUMP_GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
_ERRNO = 0x00050000  # SECCOMP_RET_ERRNO
_KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Mounts and roots. name: (x86_64, aarch64)
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # Namespaces (clone is looked at by its flags below).
    "unshare": (272, 97), "setns": (308, 268),
    # Looking into other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # Kernel machinery with a history of holes.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "msgget": (68, 186),  # see BOUNDED
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_secret": (447, 447),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "vmsplice": (278, 75),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # The machine itself.
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "sysfs": (139, None), "ustat": (136, None), "nfsservctl": (180, 42),
}  # fmt: skip
"""Calls refused whatever their arguments are."""

_SHARED_MEMORY: dict[str, tuple[int | None, int | None]] = {"memfd_create": (319, 279), "shmget": (29, 194)}

# System V objects outlive their processes. When they had filled the memory, nothing would be left to kill but the
# supervisor, and the program's own doing would look like the machine's. Small ones (PostgreSQL's lock) do no harm:
# there are 4096 segments of shared memory at most and 32000 sets of semaphores.
BOUNDED: dict[str, tuple[tuple[int, int], int]] = {"shmget": ((29, 194), 4096), "semget": ((64, 190), 32)}
"""Calls refused if their second argument is larger than the number."""

_CLONE, _CLONE3 = (56, 220), (435, 435)
_IOCTL, _PERSONALITY, _SOCKET = (16, 29), (135, 92), (41, 198)

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NEW_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the network namespace isolates these. It does not isolate AF_VSOCK.
SOCKET_FAMILIES = (1, 2, 10, 16)


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, k)


def _argument(index: int) -> bytes:
    """Load the low 32 bits of an argument (both architectures are little endian)."""
    return _instruction(_LOAD_WORD, 16 + 8 * index)


def _when(number: int, body: bytes) -> bytes:
    """Run `body` if the call is `number`. A body ends in a return, so the accumulator still holds nr after it."""
    return _instruction(_JUMP_EQUAL, number, 0, len(body) // 8) + body


@functools.cache
def build_filter(machine: str | None = None, shared_memory: bool = True) -> bytes:
    """Assemble the filter.

    Args:
        machine: as `platform.machine()` says it; None: this one.
        shared_memory: whether memory that belongs to no process may be made (memfd_create, shmget). Control groups
            count it; without them nothing would.

    Returns:
        A classic BPF program, 8 bytes an instruction, as seccomp(2) and `bwrap --seccomp` take it.

    Raises:
        ValueError: the architecture is not x86_64 or aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"no seccomp filter for {machine!r}: only {', '.join(_ARCHITECTURES)}")
    column = 0 if machine == "x86_64" else 1
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)

    program = _instruction(_LOAD_WORD, 4)
    # A call in another ABI (32-bit programs) has other numbers: nothing below would hold for it.
    program += _instruction(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0) + _instruction(_RETURN, _KILL)
    program += _instruction(_LOAD_WORD, 0)
    if machine == "x86_64":
        program += _instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1) + _instruction(_RETURN, _KILL)
    # The flags of clone3 lie in memory, which a filter cannot read: ENOSYS makes the C library use clone instead.
    program += _when(_CLONE3[column], _instruction(_RETURN, _ERRNO | errno.ENOSYS))
    program += _when(_CLONE[column], _argument(0) + _instruction(_JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1) + refuse + allow)
    requests = b"".join(_when(request, refuse) for request in (_TIOCSTI, _TIOCLINUX, _TIOCSETD))
    program += _when(_IOCTL[column], _argument(1) + requests + allow)
    # 0 is Linux as it is, 0xffffffff only asks.
    program += _when(_PERSONALITY[column],
                     _argument(0) + _when(0, allow) + _when(0xFFFFFFFF, allow) + refuse)  # fmt: skip
    families = b"".join(_when(family, allow) for family in SOCKET_FAMILIES)
    program += _when(_SOCKET[column],
                     _argument(0) + families + _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT))  # fmt: skip
    refused = REFUSED if shared_memory else REFUSED | _SHARED_MEMORY
    for name, (numbers, most) in BOUNDED.items():
        if name not in refused:
            upper = _instruction(_LOAD_WORD, 16 + 8 * 1 + 4) + _instruction(_JUMP_EQUAL, 0, 0, 1)
            body = _argument(1) + _instruction(_JUMP_GREATER_EQUAL, most + 1, 3, 0) + upper + allow + refuse
            program += _when(numbers[column], body)
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            program += _when(number, refuse)
    return program + allow
