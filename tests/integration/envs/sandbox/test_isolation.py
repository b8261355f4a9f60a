"""What a program in a sandbox can see and do: nothing of the host, no network, no privilege."""

from __future__ import annotations

import os
import platform
import re
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from envs.sandbox import bubblewrap
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.realism.load import load_profile

REPO = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def sh(backend: BubblewrapBackend, run: Callable) -> Callable[[str], tuple[int, str]]:
    """Runs a command line in one sandbox shared by this file's tests."""
    sandbox = run(backend.start({}, SandboxLimits()))

    def sh(command: str) -> tuple[int, str]:
        result = run(sandbox.shell(command))
        return result.exit_code, result.output.decode()

    return sh


def test_the_user_is_not_root_and_has_no_capability(sh: Callable) -> None:
    assert sh("id -u; id -g; id -un; hostname")[1].split() == ["1000", "1000", "dev", "devbox"]
    status = dict(line.split(":\t", 1) for line in sh("cat /proc/self/status")[1].splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandboxes belong to that user")
def test_the_sandbox_of_root_does_not_belong_to_root(sh: Callable) -> None:
    inside = sh("cat /proc/self/uid_map")[1].split()
    assert inside[0] == "1000"
    assert inside[2] == "1"
    # The map shows the outer number as the reader's own namespace does; the files' owner on the host tells it.
    assert sh("stat -c %u /usr /usr/bin/bash")[1].split() == ["65534", "65534"]


def test_host_files_are_invisible(sh: Callable) -> None:
    assert not REPO.is_relative_to("/usr")
    for path in (REPO, REPO / "composer", Path.home() / ".bashrc", Path("/etc/shadow")):
        assert sh(f"ls -d {path}")[0] != 0, path
    assert sh("ls /home")[1].split() == ["dev"]
    # What stands in for the rest has nothing of this machine's in it.
    assert sh("grep -c ' /sys' /proc/mounts; find /sys -type f | wc -l")[1].split() == ["0", "0"]
    host = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    own = {*host, "dev", *load_profile("developer").users}
    assert {line.split(":")[0] for line in sh("cat /etc/passwd")[1].splitlines()} <= own


def test_the_environment_is_the_sandboxs_own(sh: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {line.split("=")[0] for line in sh("env")[1].splitlines()}
    own = "HOME USER LOGNAME SHELL PATH LANG TERM PYTHONDONTWRITEBYTECODE PWD OLDPWD SHLVL _"
    assert names <= set(own.split())


def test_only_own_processes_are_visible(sh: Callable) -> None:
    processes = [Path(f"/proc/{name}") for name in sh("ls /proc")[1].split() if name.isdigit()]
    assert len(processes) <= 3 + len(load_profile("developer").processes)
    assert not {"pytest", "python", "watchdog"} & set(re.findall(r"\w+", sh("cat /proc/[0-9]*/cmdline")[1]))
    assert sh("tr '\\0' ' ' </proc/1/cmdline")[1].strip() == "/sbin/init"


def test_pid_1_survives_every_signal(sh: Callable) -> None:
    sh("for s in 1 2 3 6 9 11 13 14 15 17; do kill -$s 1; done")
    assert sh("echo alive")[1] == "alive\n"


@pytest.mark.parametrize("uid", [None, 0], ids=["own user", "the caller's user"])
def test_pid_1_cannot_be_looked_into_or_changed(
    run: Callable, monkeypatch: pytest.MonkeyPatch, uid: int | None
) -> None:
    """Whoever could end it could turn a failure of his own into one of the machine."""
    if uid is not None:
        monkeypatch.setattr(bubblewrap, "sandbox_uid", lambda: uid)
    backend = BubblewrapBackend("pid1", python=False)
    try:
        sandbox = run(backend.start({}, SandboxLimits()))
        for attempt in ("echo x > /proc/1/fd/0", "cat < /proc/1/mem", "ls -l /proc/1/fd/", "cat /proc/1/environ"):
            result = run(sandbox.shell(attempt))
            assert result.exit_code != 0 and b"ermission denied" in result.output, attempt
        run(sandbox.shell("chmod 777 /opt/pid1/*; rm -rf /opt/pid1"))
        assert run(sandbox.shell("echo x > /proc/1/fd/0; sleep 0.2; echo alive")).output.endswith(b"alive\n")
    finally:
        run(backend.close())


def test_nothing_of_the_host_is_left_open(sh: Callable) -> None:
    assert sh("ls /proc/self/fd")[1].split() == ["0", "1", "2", "3"]  # 3 is the listed directory itself


def test_orphans_do_not_stay_as_zombies(sh: Callable) -> None:
    sh("for i in $(seq 20); do (sleep 0.01 & ) ; done; sleep 0.2")
    states = sh("cat /proc/[0-9]*/stat")[1]
    assert "(systemd) " in states and ") Z " not in states


def test_no_network(sh: Callable, run: Callable) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    code = (
        "import socket, sys\n"
        "for address in (('127.0.0.1', int(sys.argv[1])), ('1.1.1.1', 53), ('8.8.8.8', 80)):\n"
        "    try:\n"
        "        socket.create_connection(address, 5)\n"
        "        print('reached', address)\n"
        "    except TimeoutError:\n"
        "        print('waited')\n"
        "    except OSError as e:\n"
        "        print('refused')\n"
    )
    assert sh(f"cat > /tmp/net.py <<'X'\n{code}X\npython3 /tmp/net.py {port}")[1].split() == ["refused"] * 3
    interfaces = {line.split(":")[0].strip() for line in sh("tail -n +3 /proc/net/dev")[1].splitlines()}
    assert interfaces <= {"lo", "eth0", "wlan0"}
    # Both ends of the pair are in there.
    assert sh("ls /sys/class/net")[1].split() == ["eth0", "lo", "wlan0"]
    server.close()


def test_the_system_cannot_be_written_to_by_whom_it_belongs_to(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user's sandboxes, and all that is in them, belong to that user."""
    monkeypatch.setattr(bubblewrap, "sandbox_uid", lambda: 0)
    backend = BubblewrapBackend("owner")
    try:
        sandbox = run(backend.start({}, SandboxLimits()))
        for path in ("/etc/x", "/etc/passwd", "/opt/x", "/opt/python/bin/python3"):
            assert run(sandbox.shell(f"echo 1 > {path}")).exit_code != 0, path
            assert run(sandbox.shell(f"rm -f {path}; chmod 777 {path}")).exit_code != 0, path
        with pytest.raises(PermissionError):
            run(sandbox.write("/etc/passwd", b""))
    finally:
        run(backend.close())


def test_the_host_cannot_be_written_to(sh: Callable) -> None:
    for path in ("/usr/bin/x", "/usr/x", "/etc/x", "/opt/python/x", "/dev/x", "/proc/sys/kernel/hostname", "/lib/x"):
        assert sh(f"echo 1 > {path}")[0] != 0, path
    assert sh("mknod /tmp/sda b 8 0")[0] != 0
    assert sh("touch /tmp/x /var/tmp/x ~/x /dev/shm/x x && echo ok")[1] == "ok\n"
    assert not Path("/tmp/x").exists()


def test_sandboxes_do_not_share_files(backend: BubblewrapBackend, run: Callable) -> None:
    one, two = (run(backend.start({}, SandboxLimits())) for _ in range(2))
    assert run(one.shell("echo secret > /tmp/s; echo secret > ~/s; ls /tmp ~")).exit_code == 0
    assert run(two.shell("cat /tmp/s ~/s")).exit_code == 1
    run(one.stop())
    run(two.stop())


CALLS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    return errno.errorcode.get(ctypes.get_errno(), "OK") if result < 0 else "OK"
for number, *args in {calls}:
    print(call(number, *args))
"""


# Numbers from arch/x86/entry/syscalls/syscall_64.tbl, written down a second time here.
REFUSED_CALLS = {
    "mount": (165, 0, 0, 0, 0, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "bpf": (321, 0, 0, 0),
    "keyctl": (250, 0, 0),
    "add_key": (248, 0, 0, 0, 0, 0),
    "perf_event_open": (298, 0, 0, 0, 0, 0),
    "userfaultfd": (323, 0),
    "io_uring_setup": (425, 1, 0),
    "io_uring_enter": (426, 0, 0, 0, 0, 0),
    "io_uring_register": (427, 0, 0, 0, 0),
    "unshare NEWUSER": (272, 0x10000000),
    "clone NEWUSER": (56, 0x10000011, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "kexec_file_load": (320, 0, 0, 0, 0, 0),
    "personality": (135, 8),
    "ioctl TIOCSTI": (16, 0, 0x5412, 0),
    "setns": (308, 0, 0),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "fsopen": (430, 0, 0),
    "open_tree": (428, 0, 0, 0),
    "move_mount": (429, 0, 0, 0, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "ioctl TIOCSTI, high bits": (16, 0, 0x100005412, 0),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_seccomp_refuses_what_no_program_needs(sh: Callable) -> None:
    code = CALLS.format(calls=list(REFUSED_CALLS.values()))
    answers = sh(f"cat > /tmp/calls.py <<'X'\n{code}X\npython3 /tmp/calls.py")[1].split()
    assert dict(zip(REFUSED_CALLS, answers, strict=True)) == dict.fromkeys(REFUSED_CALLS, "EPERM")

    others = {"clone3": (435, 0, 0), "socket AF_VSOCK": (41, 40, 1, 0), "personality, asking": (135, 0xFFFFFFFF)}
    code = CALLS.format(calls=list(others.values()))
    answers = sh(f"cat > /tmp/calls.py <<'X'\n{code}X\npython3 /tmp/calls.py")[1].split()
    assert answers == ["ENOSYS", "EAFNOSUPPORT", "OK"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is an ABI of x86_64")
def test_a_call_in_another_abi_kills(sh: Callable) -> None:
    code = CALLS.format(calls=[(0x40000000 + 39,)])
    assert sh(f"cat > /tmp/x32.py <<'X'\n{code}X\npython3 /tmp/x32.py")[0] == 128 + 31


def test_the_supervisor_is_out_of_reach(sh: Callable) -> None:
    """Its process is in no process list of the sandbox, and none of its descriptors is inherited."""
    code = textwrap.dedent("""
        import os
        print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])
    """)
    assert sh(f'python3 -c "{code}"')[1].strip() == "[0, 1, 2]"
    commands = sh("cat /proc/[0-9]*/cmdline")[1]
    assert "bash" in commands and "forkserver" not in commands


def test_user_namespaces_cannot_be_made(sh: Callable) -> None:
    assert sh("unshare -Ur true")[0] != 0
    assert sh("su -c id; mount -t tmpfs x /mnt")[0] != 0
