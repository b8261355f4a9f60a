"""The seccomp profile that containers get, in place of the engine's own: the same on every engine.

Engines differ in what their own lets through: that of Docker 20.10 allows io_uring, later ones do not. This one allows
what programs use and refuses everything else, above all what bubblewrap's sandboxes refuse (envs/sandbox/seccomp.py).
Programs of another kind than the machine's, 32-bit ones on a 64-bit machine, are killed: their calls have other
numbers.

Format: https://docs.docker.com/engine/security/seccomp. Names: those of the kernel's system call tables up to Linux
6.17; the engine leaves out what its kernel does not know.
"""

from __future__ import annotations

import errno
import functools
import json
from typing import Any

from envs.sandbox.seccomp import BOUNDED, NEW_NAMESPACES, SOCKET_FAMILIES

_ALLOWED = """
    accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
    clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
    faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync
    fgetxattr file_getattr file_setattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate
    futex futex_requeue futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd
    getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid
    getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday
    getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
    io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr listxattrat
    llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier memfd_create mincore mkdir
    mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
    mq_timedsend mq_unlink mremap mseal msgctl msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat
    open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll
    prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6 pwrite64 pwritev pwritev2 read readahead
    readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr
    sched_setparam sched_setscheduler sched_yield seccomp select semctl semop semtimedop sendfile sendmmsg sendmsg
    sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid
    setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr setxattrat shmat
    shmctl shmdt shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync
    sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
    utime utimensat utimes vfork wait4 waitid write writev
"""
_UNCHANGED, _ASKED = 0, 0xFFFFFFFF
"""Personalities: Linux as it is, and what only asks for it."""


@functools.cache
def profile() -> str:
    """The profile as the engine takes it, behind `seccomp=`."""
    rules: list[dict[str, Any]] = [
        {"names": _ALLOWED.split(), "action": "SCMP_ACT_ALLOW"},
        _allow("clone", 0, "SCMP_CMP_MASKED_EQ", NEW_NAMESPACES),
        # Its flags lie in memory, which a filter cannot read: this error makes the C library use clone instead.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        *(_allow("personality", 0, "SCMP_CMP_EQ", value) for value in (_UNCHANGED, _ASKED)),
        *(_allow("socket", 0, "SCMP_CMP_EQ", family) for family in SOCKET_FAMILIES),
        *(_allow(name, 1, "SCMP_CMP_LE", most) for name, (_, most) in BOUNDED.items()),
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.EPERM, "syscalls": rules})


def _allow(name: str, index: int, comparison: str, value: int) -> dict[str, Any]:
    """Allow a call by one of its arguments; of a mask, the bits must be 0."""
    argument = {"index": index, "value": value, "valueTwo": 0, "op": comparison}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}
