"""The few Linux system calls that Python 3.11 has no function for, through the C library.

Every function raises `OSError` with the kernel's errno. Only the fork server and the supervisors call these.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

_CLONE_VM = 0x00000100
_CLONE_FILES = 0x00000400
_CLONE_PARENT = 0x00008000
CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_RELATIME = 0x200000
_ST_RELATIME = 0x1000
_MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

# These have no wrapper in glibc, or not this one; numbers differ between the architectures that seccomp.py knows.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CLONE = {"x86_64": 56, "aarch64": 220}
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_OPEN_TREE_CLONE = 1
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 0x1

_NUM_CAPABILITIES = int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock, as a child that returns from `clone` needs it.
_locked_libc = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` (CLONE_NEW*) for fresh ones."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces in `flags` of the process behind the pidfd `fd`."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system; None stands for a null pointer (mount(2))."""
    raw = [None if value is None else os.fsencode(value) for value in (source, target, kind, data)]
    _check(_libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]), f"mount {source or kind} on {target}")


def make_read_only(folder: str) -> None:
    """Let nobody write below the mount point `folder`, further mounts below it included (mount_setattr(2))."""
    wanted = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY)
    arguments = (ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), os.fsencode(folder))
    if _libc.syscall(*arguments, ctypes.c_uint(_AT_RECURSIVE), wanted, ctypes.c_size_t(32)) == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        raise OSError(ctypes.get_errno(), f"mount_setattr {folder}: {os.strerror(ctypes.get_errno())}")
    # Linux before 5.12. Flags that a namespace of fewer rights inherited may not be left out.
    kept = os.statvfs(folder).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    if os.statvfs(folder).f_flag & _ST_RELATIME:
        kept |= MS_RELATIME
    mount(None, folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def open_apart(folder: str) -> int:
    """A descriptor of the mounted directory `folder` from which `..` leads nowhere (open_tree(2)).

    A mount of its own that hangs in no tree: whoever gets hold of it has what is below it and no more.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    fd = _libc.syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_int(_AT_FDCWD), os.fsencode(folder), flags)
    _check(fd, f"open_tree {folder}")
    return fd


_STACK_BYTES = 512
"""pause(2) and its caller need less than a tenth; each page of a stack has to be copied when it is first touched."""
_stacks: list[ctypes.Array[ctypes.c_char]] = []
"""Of the sleepers, for as long as this process lives."""


def start_sleepers(names: Sequence[str]) -> set[int]:
    """Start children that do nothing, under names of up to 15 bytes; returns their PIDs.

    They run in this process's memory, each on a stack of its own, and so cost 20 microseconds each instead of a fork's
    milliseconds. They never leave pause(2): no signal may have a handler here.
    """
    stacks = ctypes.create_string_buffer(_STACK_BYTES * (len(names) + 1))
    _stacks.append(stacks)
    sleep = ctypes.cast(_libc.pause, ctypes.c_void_p)
    flags = _CLONE_VM | _CLONE_FILES | signal.SIGCHLD
    top = (ctypes.addressof(stacks) + _STACK_BYTES) & ~0xF
    pids, own = set(), _own_name()
    for name in names:
        _set_name(name.encode())
        pids.add(pid := _libc.clone(sleep, ctypes.c_void_p(top), flags, None))
        _check(pid, "clone")
        top += _STACK_BYTES
    _set_name(own)
    return pids


def _own_name() -> bytes:
    """What /proc/<pid>/comm says of this thread."""
    name = ctypes.create_string_buffer(16)
    _check(_libc.prctl(_PR_GET_NAME, name, 0, 0, 0), "prctl(PR_GET_NAME)")
    return name.value


def _set_name(name: bytes) -> None:
    """What /proc/<pid>/comm is to say of this thread, and of children that start from now on."""
    _check(_libc.prctl(_PR_SET_NAME, name[:15], 0, 0, 0), "prctl(PR_SET_NAME)")


def forget_arguments() -> None:
    """Blank out this process's command line, and that of children (proc_pid_stat(5), fields 48 and 49)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)


def shift_clocks(uptime_s: float) -> None:
    """Enter a time namespace, for new programs and children, in which the machine has run for `uptime_s`."""
    unshare(CLONE_NEWTIME)
    names = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
    offsets = {name: int(uptime_s - time.clock_gettime(clock)) for name, clock in names.items()}
    Path("/proc/self/timens_offsets").write_text("".join(f"{name} {offset} 0\n" for name, offset in offsets.items()))


def unmount(target: str) -> None:
    """Take a mount off at once; what still uses it keeps it (umount2(2), MNT_DETACH)."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def fork_for_parent() -> int:
    """Fork a child that is the child of this process's parent; 0 in the child, which may do little more than exec.

    Nothing that Python or the C library do at a fork is done: there must be one thread.
    """
    number = ctypes.c_long(_CLONE[os.uname().machine])
    flags = ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD)
    pid = _locked_libc.syscall(number, flags, None, None, None, None)
    _check(pid, "clone")
    return pid


def pivot_root(new_root: str) -> None:
    """Make the mount point `new_root` the root directory and drop the old one from the mount namespace."""
    os.chdir(new_root)
    # pivot_root(".", ".") stacks the old root on the new one (pivot_root(2), NOTES), so no folder is needed for it.
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop every capability: bounding set, ambient set, effective, permitted and inheritable."""
    for capability in range(_NUM_CAPABILITIES):
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "capset")


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send the signal `number` to this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def set_dumpable(dumpable: bool) -> None:
    """Say whether processes of the same user may look into this one (/proc/<pid>/mem, core dumps)."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def set_no_new_privileges() -> None:
    """Make set-uid bits and file capabilities powerless from here on."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def install_seccomp(program: bytes) -> None:
    """Load a classic BPF program (8 bytes an instruction) as this thread's seccomp filter."""

    class _Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    argument = _Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0), "prctl(PR_SET_SECCOMP)")
