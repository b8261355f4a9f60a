"""Docker sandboxes: what a program in one can see, do and use up, and what it cannot bring about."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import platform
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from composer.types import Task
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.sandbox import DockerSandbox
from tests.integration.envs.sandbox.host_tells import lacked_here
from tests.integration.envs.sandbox.test_isolation import CALLS, REFUSED_CALLS

pytestmark = pytest.mark.docker

MIB = 2**20
LIMITS = SandboxLimits(exec_timeout_s=20, output_bytes=2**16)


@pytest.fixture(scope="module")
def backend(run: Callable, docker_engine: str, docker_image: str) -> Iterator[DockerBackend]:
    backend = DockerBackend("test", docker_image, host=docker_engine)
    yield backend
    run(backend.close())


@pytest.fixture
def sandbox(backend: DockerBackend, run: Callable) -> Iterator[DockerSandbox]:
    sandbox = run(backend.start({"main.py": b"x = 1\n"}, LIMITS))
    yield sandbox
    run(sandbox.stop())


def test_the_user_is_not_root_and_can_become_nobody_else(sandbox: DockerSandbox, run: Callable) -> None:
    assert run(sandbox.shell("id -u; id -g; id -un; hostname; echo $HOME")).output.split() == (
        [b"1000", b"1000", b"dev", b"devbox", b"/home/dev"]
    )
    for result in (run(sandbox.shell("cat /proc/self/status")), run(sandbox.exec(["cat", "/proc/self/status"]))):
        status = dict(line.split(":\t", 1) for line in result.output.decode().splitlines() if ":\t" in line)
        assert [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")] == [0, 0, 0]
        assert int(status["CapBnd"], 16) == 1 << 5  # CAP_KILL: root's alone, by which he ends what the user runs
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for attempt in (
        "unshare -Ur true",
        "mount -t tmpfs x /tmp",
        "mknod /tmp/sda b 8 0",
        "echo 1 > /proc/sysrq-trigger",
    ):
        assert run(sandbox.shell(attempt)).exit_code != 0, attempt


def test_there_is_no_network(sandbox: DockerSandbox, run: Callable) -> None:
    shown = run(sandbox.shell("tail -n +3 /proc/net/dev")).output
    assert [line.split(b":")[0].strip() for line in shown.splitlines()] == [b"lo"]
    code = "import socket\ntry: socket.create_connection(('1.1.1.1', 53), 2)\nexcept OSError as e: print(e.errno)"
    assert int(run(sandbox.exec(["python3", "-c", code])).output) == errno.ENETUNREACH


def test_nothing_but_a_few_places_can_be_written_to(sandbox: DockerSandbox, run: Callable) -> None:
    found = run(sandbox.shell("find / -xdev -type d -writable 2>/dev/null; find /dev -type d -writable 2>/dev/null"))
    assert set(found.output.split()) <= {b"/home/dev", b"/tmp", b"/dev/shm", b"/dev/mqueue"}
    assert run(sandbox.shell("touch /tmp/x ~/x /dev/shm/x x && echo ok")).output == b"ok\n"
    for path in ("/usr/bin/x", "/etc/x", "/x", "/var/x", "/usr/bin/cat"):
        assert run(sandbox.shell(f"echo 1 > {path}")).exit_code != 0, path


def test_the_backends_own_processes_are_out_of_reach(sandbox: DockerSandbox, run: Callable) -> None:
    signals = "for p in /proc/[0-9]*; do [ -O $p ] || for s in 1 2 3 9 15 19; do kill -$s ${p#/proc/}; done; done"
    assert b"not permitted" in run(sandbox.shell(signals)).output
    assert run(sandbox.shell("echo alive")).output == b"alive\n"
    look = "for p in /proc/[0-9]*; do [ -O $p ] || ls $p/fd $p/root; done 2>&1 | grep -cv 'Permission denied'"
    assert run(sandbox.shell(look)).output == b"0\n"
    for attempt in ("echo x > /proc/1/fd/0", "cat /proc/1/environ", "ls /proc/1/fd/"):
        assert run(sandbox.shell(attempt)).exit_code != 0, attempt
    assert run(sandbox.stats()).num_processes == 1  # the shell


def test_orphans_do_not_stay_as_zombies(sandbox: DockerSandbox, run: Callable) -> None:
    run(sandbox.shell("for i in $(seq 20); do (sleep 0.01 & ) ; done; sleep 0.3"))
    assert b") Z " not in run(sandbox.shell("cat /proc/[0-9]*/stat")).output


def test_variables_reach_a_program_exactly(sandbox: DockerSandbox, run: Callable) -> None:
    values = {
        "A": "a=b 'c' \"d\" $e `f` \\g",
        "B": "two\nlines\n",
        "C": "",
        "D.e": "\u017c\u00f3\u0142\u0107 \U0001f600",
        "E": "  x  ",
    }
    code = "import os, sys; sys.stdout.write(repr([os.environ[n] for n in sys.argv[1:]]))"
    result = run(sandbox.exec(["python3", "-c", code, *values], env=values))
    assert result.output.decode() == repr(list(values.values()))
    assert run(sandbox.exec(["echo", "a\0b"])).exit_code == 126


def test_a_thousand_files_are_there_at_once(backend: DockerBackend, run: Callable) -> None:
    files = {f"d{i % 40}/e/f{i}.txt": b"%d\n" % i for i in range(1000)}
    began = time.monotonic()
    sandbox = run(backend.start(files, LIMITS))
    assert run(sandbox.files()) == files
    assert time.monotonic() - began < 10
    run(sandbox.stop())


def test_memory(backend: DockerBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(memory_bytes=128 * MIB, disk_bytes=32 * MIB)))
    hog = "x = []\nwhile True: x.append(bytearray(b'x' * 2**20))"
    result = run(sandbox.exec(["python3", "-c", hog]))
    assert (result.exit_code, result.timed_out) == (137, False)
    # Many small hogs together are bounded as one large one is.
    hogs = "\n".join(f"python3 -c \"import time; x = b'x' * {40 * MIB}; time.sleep(3)\" & p{i}=$!" for i in range(5))
    waits = "; ".join(f"wait $p{i}; echo $?" for i in range(5))
    codes = run(sandbox.shell(f"{hogs}\n{waits}")).output.split()
    assert codes.count(b"0") <= 2 and codes.count(b"137") >= 1
    assert run(sandbox.shell("echo alive")).output.endswith(b"alive\n")
    assert run(sandbox.shell("cat /proc/self/oom_score_adj")).output == b"500\n"
    stats = run(sandbox.stats())
    assert 64 * MIB < stats.peak_memory_bytes <= 128 * MIB and stats.cpu_seconds > 0
    run(sandbox.stop())


def test_processes(backend: DockerBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(num_processes=20)))
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    began = time.monotonic()
    assert run(sandbox.exec(["python3", "-c", bomb], timeout_s=1.0)).timed_out
    assert time.monotonic() - began < 10
    count = (
        "import subprocess\nn = 0\ntry:\n    for n in range(99): subprocess.Popen(['sleep', '9'])\n"
        "except OSError as e: print(n, e.errno)"
    )
    started, number = run(sandbox.exec(["python3", "-c", count])).output.split()
    # What the engine needs to start a program with is free again when the program runs.
    assert 15 <= int(started) <= 20 + 8
    assert int(number) == errno.EAGAIN
    run(sandbox.stop())


def test_disk(backend: DockerBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(disk_bytes=16 * MIB)))
    fill = "for d in /tmp ~ /dev/shm . ; do for i in $(seq 9); do head -c 2M /dev/zero > $d/f$i; done; done"
    assert b"No space left" in run(sandbox.shell(f"{fill} 2>&1 | tail -1")).output
    sizes = run(sandbox.shell("stat -c %s /tmp/f* ~/f* /dev/shm/f* f*")).output.split()
    assert 14 * MIB <= sum(map(int, sizes)) <= 16 * MIB
    with pytest.raises(OSError, match="space") as error:
        run(sandbox.write("more", b"x" * 2 * MIB))
    assert error.value.errno == errno.ENOSPC
    # Empty files cost memory of the kernel, which the disk's size does not count.
    run(sandbox.shell("rm -f /tmp/*"))
    empty = (
        "import os\nn = 0\ntry:\n    while True: os.close(os.open(f'/tmp/e{n}', os.O_CREAT)); n += 1\n"
        "except OSError: print(n)"
    )
    assert int(run(sandbox.exec(["python3", "-c", empty])).output) <= 16 * MIB // 4096
    run(sandbox.stop())


def test_too_many_files_and_holes_are_refused_at_once(sandbox: DockerSandbox, run: Callable) -> None:
    run(sandbox.shell("truncate -s 60M hole; ln hole second"))
    began = time.monotonic()
    with pytest.raises(OSError, match="large") as error:
        run(sandbox.files())
    assert error.value.errno == errno.EFBIG and time.monotonic() - began < 10
    run(sandbox.shell("rm hole second; echo 1 > a; ln a b"))
    assert run(sandbox.files()) == {"main.py": b"x = 1\n", "a": b"1\n", "b": b"1\n"}
    run(sandbox.shell("cd /; rm -rf ~/project"))
    with pytest.raises(FileNotFoundError):
        run(sandbox.files())
    assert run(sandbox.exec(["true"])).exit_code != 0
    assert run(sandbox.shell("pwd")).output == b"/\n"
    run(sandbox.write("back.txt", b"1"))
    assert run(sandbox.files()) == {"back.txt": b"1"}


KILLER = "(setsid bash -c 'while :; do kill -9 -1; done' >/dev/null 2>&1 &)"
BOMB = "(setsid bash -c 'f() { f & f & sleep 60; }; f' >/dev/null 2>&1 &) ; sleep 0.5"
# Nothing but a pipe's name can be in the way of a path, and here it comes and goes.
FLICKER = "(setsid bash -c 'while :; do rm -f it; mkfifo it; rm -f it; echo 1 > it; done' >/dev/null 2>&1 &)"
HOG = "(setsid python3 -c 'import time\nwhile True:\n  x = bytearray(120 * 2**20); time.sleep(0.1)' >/dev/null 2>&1 &)"


@pytest.mark.parametrize("attack", [KILLER, BOMB, FLICKER, HOG], ids=["killer", "bomb", "flicker", "hog"])
def test_no_program_makes_its_failure_look_like_the_machines(
    backend: DockerBackend, run: Callable, attack: str
) -> None:
    """Whatever runs in the background: calls are answered, if need be after it was killed."""
    limits = SandboxLimits(memory_bytes=128 * MIB, disk_bytes=32 * MIB, exec_timeout_s=20)
    sandbox = run(backend.start({"main.py": b"x = 1\n"}, limits))
    for _ in range(2):
        run(sandbox.shell(attack, timeout_s=3))
        assert run(sandbox.read("main.py")) == b"x = 1\n"
        run(sandbox.shell(attack, timeout_s=3))
        run(sandbox.write("main.py", b"x = 1\n"))
        run(sandbox.shell(attack, timeout_s=3))
        assert run(sandbox.files())["main.py"] == b"x = 1\n"
        run(sandbox.shell(attack, timeout_s=3))
        assert run(sandbox.exec(["echo", "1"])).exit_code in (0, 137)
    run(sandbox.stop())


def test_a_killed_program_is_told_from_a_lost_sandbox(sandbox: DockerSandbox, run: Callable) -> None:
    assert run(sandbox.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
    assert run(sandbox.exec(["bash", "-c", "kill -9 -1"])).exit_code in (0, 137)  # it cannot kill itself so
    assert run(sandbox.read("main.py")) == b"x = 1\n"


class TestWithoutBash:
    """A POSIX shell in bash's place."""

    @pytest.fixture
    def sandbox(self, run: Callable, docker_engine: str, small_docker_image: str) -> Iterator[DockerSandbox]:
        backend = DockerBackend("small", small_docker_image, host=docker_engine)
        yield run(backend.start({"a/b.txt": b"b"}, LIMITS))
        run(backend.close())

    def test_state_lasts(self, sandbox: DockerSandbox, run: Callable) -> None:
        run(sandbox.shell("cd a; X='two  words'; f() { echo f$1; }"))
        assert run(sandbox.shell('pwd; echo "$X"\nf 1')).output == b"/home/dev/project/a\ntwo  words\nf1\n"
        # A mistake is no reason to lose it.
        assert run(sandbox.shell("if then fi")).exit_code == 2
        assert run(sandbox.shell('echo "$X"; cd ..')).output == b"two  words\n"

    def test_any_text_gets_through(self, sandbox: DockerSandbox, run: Callable) -> None:
        text = "\u0105\u0141\u0142 '\"\\n$ \u00e9 \t" + "".join(map(chr, range(0x80, 0xA0)))
        assert run(sandbox.shell(f"cat <<'X'\n{text}\nX")).output == f"{text}\n".encode()

    def test_ends_and_deadlines(self, sandbox: DockerSandbox, run: Callable) -> None:
        assert run(sandbox.shell("(exit 7)")).exit_code == 7
        assert run(sandbox.shell("exit 3")).exit_code == 3
        run(sandbox.shell("sleep 100 & cd a"))
        result = run(sandbox.shell("echo begun; sleep 200 & sleep 201", timeout_s=0.5))
        assert (result.timed_out, result.exit_code, result.output) == (True, 124, b"begun\n")
        listing = "pwd; for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done | grep ^sleep"
        assert run(sandbox.shell(listing)).output == b"/home/dev/project/a\nsleep 100 \n"
        assert run(sandbox.shell("exec 1>&- 2>&-; echo x; true")).exit_code == 0
        assert run(sandbox.shell("echo back; cd ..")).output == b"back\n"

    def test_files(self, sandbox: DockerSandbox, run: Callable) -> None:
        data = bytes(range(256)) * 1000
        run(sandbox.write("deep/er/data", data))
        assert run(sandbox.read("deep/er/data")) == data
        assert run(sandbox.exec(["cat"], stdin=data[:3000])).output == data[:3000]
        assert run(sandbox.files()) == {"a/b.txt": b"b", "deep/er/data": data}
        for path, error in (("none", FileNotFoundError), ("a", IsADirectoryError), ("a/b.txt/c", FileNotFoundError)):
            with pytest.raises(error):
                run(sandbox.read(path))
        for path, error in (("a", IsADirectoryError), ("/etc/x", PermissionError), ("a/b.txt/c", OSError)):
            with pytest.raises(error):
                run(sandbox.write(path, b""))


def test_a_full_disk_of_ours_is_no_doing_of_the_sandboxs(
    sandbox: DockerSandbox, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.SpooledTemporaryFile", lambda size: Full())
        with pytest.raises(SandboxError, match="could not collect its files here: .*No space left"):
            run(sandbox.files())
    with pytest.raises(OSError, match="File too large"):
        run(sandbox.files(max_bytes=0))  # that is its doing


def test_calls_wait_for_each_other(sandbox: DockerSandbox, run: Callable) -> None:
    async def scenario() -> list[bytes]:
        results = await asyncio.gather(
            *(sandbox.shell(f"sleep 0.1; echo {i}") for i in range(3)), sandbox.exec(["echo", "3"])
        )
        return [result.output for result in results]

    assert run(scenario()) == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_what_writes_in_the_background_holds_nothing_up(sandbox: DockerSandbox, run: Callable) -> None:
    run(sandbox.shell("yes & sleep 0.2"))
    began = time.monotonic()
    for number in (3, 4):
        result = run(sandbox.shell(f"(exit {number})", timeout_s=10))
        assert (result.exit_code, result.timed_out) == (number, False)
    run(sandbox.shell("kill %1; wait; true"))
    run(sandbox.shell("true"))
    assert run(sandbox.shell("echo quiet")).output == b"quiet\n"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "double",
    [
        b"from main import double",
        b"from composer_solution import call\ndef double(x):\n    return call('main.double', x)",
    ],
)
def test_graders_get_along_with_it(double: bytes, backend: DockerBackend, run: Callable) -> None:
    """Also those whose tests run apart from the solution."""
    tests = {"test_hidden.py": double + b"\ndef test_x():\n    assert double(4) == 8\n"}
    task, grader = Task("t/0", "", {"main.py": b""}, tests), PytestGrader()
    for body, score in ((b"x * 2", 1.0), (b"x + 2", 0.0), (b"__import__('os')._exit(0)", 0.0)):
        solution = {"main.py": b"def double(x):\n    return " + body + b"\n"}
        grade = run(grader.grade(task, solution, backend))
        assert grade.score == score, (body, grade.details)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_seccomp_refuses_the_same_on_every_engine(backend: DockerBackend, run: Callable) -> None:
    """As bubblewrap's does, io_uring among it, which the profile of Docker 20.10 allows; terminals there are none."""
    refused = {name: call for name, call in REFUSED_CALLS.items() if "TIOCSTI" not in name}
    others = {"clone3": (435, 0, 0), "socket AF_VSOCK": (41, 40, 1, 0), "personality, asking": (135, 0xFFFFFFFF)}
    code = CALLS.format(calls=[*refused.values(), *others.values()])
    sandbox = run(backend.start({"calls.py": code.encode()}, SandboxLimits()))
    answers = run(sandbox.exec(["python3", "calls.py"])).output.decode().split()
    assert dict(zip(refused, answers, strict=False)) == dict.fromkeys(refused, "EPERM")
    assert answers[len(refused) :] == ["ENOSYS", "EPERM", "OK"]
    code = CALLS.format(calls=[(0x40000000 + 39,)])
    run(sandbox.write("x32.py", code.encode()))
    assert run(sandbox.exec(["sh", "-c", "python3 x32.py"])).exit_code in (128 + 31, -31)
    run(sandbox.stop())


MOST_TELLS = 14
"""Of the 39 by which backends are compared, all of them counted: also the three that a virtual machine's kernel tells
(`kernel`, `hypervisor`, `kernel command line`), which an engine cannot hide and other machines do not have."""


def test_the_default_gives_little_away(backend: DockerBackend, run: Callable) -> None:
    findings = run(backend.audit())
    compared = [f for f in findings if f.required]
    assert len(compared) == 39
    shown = {f.name for f in compared if not f.ok}
    assert len(shown - lacked_here(findings)) <= MOST_TELLS, shown
    # What keeps the sandbox shut was not given up for that.
    assert {"no new privileges", "seccomp", "capabilities"} <= shown and "root" not in shown
    # Each that is not what keeps it shut has a remedy, or a reason.
    kept_shut = {"no new privileges", "seccomp", "capabilities", "PID namespace", "no kernel threads"}
    assert all(f.remedy for f in compared if not f.ok and f.name not in kept_shut | {"late first process"})


def test_a_plain_one_shows_itself(run: Callable, docker_engine: str, docker_image: str) -> None:
    backend = DockerBackend("plain", docker_image, host=docker_engine, profile="plain")
    try:
        shown = {f.name for f in run(backend.audit()) if not f.ok}
        assert {"first process", "few processes", "machine id", "home", "memory limit", "/sys"} <= shown
        sandbox = run(backend.start({}, SandboxLimits()))
        run(sandbox.shell("python3 -c \"x = b'x' * 50_000_000\""))
        stats = run(sandbox.stats())
        assert stats.peak_memory_bytes > 50_000_000 and stats.cpu_seconds > 0
    finally:
        run(backend.close())


def test_a_profile_of_ones_own(run: Callable, docker_engine: str, docker_image: str, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "user: ada\nhostname: engine\nfirst_process: init\nprocesses: [cron, 'it''s']\ndevices: [sda]\nage_days: 30\n"
        "folders: [notes]\nfiles:\n  .profile: |\n    umask 027\n  /etc/motd: |\n    welcome\n"
    )
    backend = DockerBackend("mine", docker_image, host=docker_engine, profile=str(profile))
    try:
        sandbox = run(backend.start({"main.py": b"x = 1\n"}, SandboxLimits()))
        look = "whoami; hostname; cat /proc/[0-9]*/comm | sort -u | grep -v bash; cat ~/.profile /etc/motd; ls ~"
        shown = run(sandbox.shell(look.replace("whoami", "id -un"))).output.decode().split()
        assert shown[:2] == ["ada", "engine"]
        assert {"init", "cron", "it's", "umask", "welcome", "notes"} <= set(shown)
        # Nothing of it is the user's to change, and none of it is in his files.
        assert run(sandbox.shell("echo x > /dev/sda; echo x > /etc/motd; kill -9 $(pidof x) 1 2>&1")).exit_code != 0
        assert run(sandbox.files()) == {"main.py": b"x = 1\n"}
        assert run(sandbox.stats()).num_processes == 1
    finally:
        run(backend.close())


def test_the_scenery_is_out_of_reach(sandbox: DockerSandbox, run: Callable) -> None:
    count = "ls -ld /proc/[0-9]* | grep -c ' root root '"
    before = run(sandbox.shell(count)).output
    assert int(before) >= 20
    run(sandbox.exec(["bash", "-c", "kill -9 -1; kill -STOP -1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done"]))
    run(sandbox.shell("true"))  # the shell was the user's to kill, and may not be known to be gone
    assert run(sandbox.shell(count)).output == before
    assert run(sandbox.shell("mkdir /sys/x; : >/dev/x; echo x >/run/initctl")).exit_code != 0
    assert run(sandbox.shell("cat /etc/resolv.conf")).output == b"nameserver 127.0.0.53\n"


def test_outputs_keep_their_order_under_load(backend: DockerBackend, run: Callable) -> None:
    lines = 200
    script = f"for i in $(seq {lines}); do echo o$i; echo e$i >&2; done"
    expected = "".join(f"o{i}\ne{i}\n" for i in range(1, lines + 1)).encode()

    async def one() -> list[bytes]:
        sandbox = await backend.start({}, LIMITS)
        try:
            await sandbox.shell("for i in 1 2 3; do (while :; do :; done &); done")
            return [(await sandbox.exec(["sh", "-c", script])).output for _ in range(5)]
        finally:
            await sandbox.stop()

    async def scenario() -> list[list[bytes]]:
        return await asyncio.gather(*(one() for _ in range(3)))

    assert all(output == expected for outputs in run(scenario()) for output in outputs)


def test_what_cannot_be_run_is_said_as_a_shell_says_it(sandbox: DockerSandbox, run: Callable) -> None:
    run(sandbox.shell("echo text >text; printf '#!/no/such\\n' >script; chmod +x script; mkdir folder"))
    for argv, code, why in (
        (["no-such-program"], 127, b"no-such-program"),
        (["./none"], 127, b"./none"),
        (["./text"], 126, b"ermission denied"),
        (["./folder"], 126, b"./folder"),
        (["-x"], 127, b"-x"),
        (["a=b"], 127, b"a=b"),
    ):
        result = run(sandbox.exec(argv))
        assert result.exit_code == code and why in result.output, (argv, result)
    assert run(sandbox.exec(["./script"])).exit_code in (126, 127)


def test_an_image_without_a_shell_is_refused_with_a_reason(
    backend: DockerBackend, run: Callable, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w") as tar:
        folder = tarfile.TarInfo("etc")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
    with pytest.raises(SandboxStartError, match="/bin/sh") as error:
        run(backend.start({}, LIMITS, image=f"tarball:{tmp_path}/empty.tar"))
    assert "\n" not in str(error.value)
