"""Each limit really bounds."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.bubblewrap import BubblewrapBackend

MIB = 2**20


def test_memory(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(memory_bytes=128 * MIB, disk_bytes=32 * MIB)))
    hog = "x = []\nwhile True: x.append(bytearray(b'x' * 2**20))"
    result = run(sandbox.exec(["python3", "-c", hog]))
    assert result.exit_code != 0
    assert not result.timed_out
    # Many small hogs together are bounded as one large one is.
    hogs = "\n".join(f"python3 -c \"import time; x = b'x' * {40 * MIB}; time.sleep(3)\" & p{i}=$!" for i in range(5))
    waits = "; ".join(f"wait $p{i}; echo $?" for i in range(5))
    result = run(sandbox.shell(f"{hogs}\n{waits}"))
    codes = result.output.split()
    # Without control groups all of the command is killed: nobody knows which of its processes is to blame.
    grouped = result.exit_code != 137
    assert codes.count(b"0") <= 2 and (codes.count(b"137") >= 1 or not grouped)
    assert run(sandbox.shell("echo alive")).output.endswith(b"alive\n")
    # Without them the memory is looked at every few milliseconds, in which a little more can be taken.
    assert run(sandbox.stats()).peak_memory_bytes <= (128 if grouped else 160) * MIB
    run(sandbox.stop())


def test_processes(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(num_processes=20)))
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    began = time.monotonic()
    assert run(sandbox.exec(["python3", "-c", bomb], timeout_s=1.0)).timed_out
    assert time.monotonic() - began < 10
    assert run(sandbox.shell("f() { f | f & }; f; sleep 5", timeout_s=1.0)).exit_code != 0
    assert run(sandbox.shell("echo alive")).output.endswith(b"alive\n")
    count = (
        "import subprocess\nn = 0\ntry:\n    for n in range(99): subprocess.Popen(['sleep', '9'])\n"
        "except OSError as e: print(n, e.errno)"
    )
    started, number = run(sandbox.exec(["python3", "-c", count])).output.split()
    assert 15 <= int(started) <= 20
    assert int(number) == errno.EAGAIN
    run(sandbox.stop())


def test_a_crowd_that_multiplies_is_gone_after_a_timeout(backend: BubblewrapBackend, run: Callable) -> None:
    """More processes than one page of the kernel's list has room for, which end and are made anew all the time."""
    sandbox = run(backend.start({}, SandboxLimits(num_processes=1200, memory_bytes=2**30)))
    crowd = (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(900):\n    if not os.fork(): time.sleep(999)\n"
        "open('full', 'w').close()\n"
        "if os.fork(): time.sleep(999)\n"
        "while True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass\n"
    )
    began = time.monotonic()
    assert run(sandbox.exec(["python3", "-c", crowd], timeout_s=6.0)).timed_out
    assert run(sandbox.read("full")) == b"", "the crowd was there"
    assert run(sandbox.stats()).num_processes <= 2 and time.monotonic() - began < 30
    run(sandbox.stop())


def test_size_of_a_file(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(file_bytes=MIB)))
    run(sandbox.shell("head -c 5M /dev/zero > big"))
    assert run(sandbox.shell("stat -c %s big")).output == b"%d\n" % MIB
    with pytest.raises(OSError, match="large") as error:
        run(sandbox.write("big", b"x" * (MIB + 1)))
    assert error.value.errno == errno.EFBIG
    run(sandbox.write("big", b"x" * MIB))
    run(sandbox.stop())


def test_disk(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(disk_bytes=16 * MIB)))
    fill = (
        "for d in /tmp ~ /var/tmp /run /dev/shm /; do for i in $(seq 9); do head -c 2M /dev/zero > $d/f$i; done; done"
    )
    assert b"No space left" in run(sandbox.shell(f"{fill} 2>&1 | tail -1")).output
    sizes = run(sandbox.shell("stat -c %s /tmp/f* ~/f* /var/tmp/f* /run/f* /dev/shm/f* /f*")).output.split()
    written = sum(int(size) for size in sizes)
    assert 14 * MIB <= written <= 16 * MIB
    with pytest.raises(OSError, match="space") as error:
        run(sandbox.write("more", b"x" * 2 * MIB))
    assert error.value.errno == errno.ENOSPC
    # Empty files cost memory of the kernel, which the disk's size does not count.
    empty = (
        "import os\nn = 0\ntry:\n    while True: os.close(os.open(f'/tmp/e{n}', os.O_CREAT)); n += 1\n"
        "except OSError: print(n)"
    )
    assert int(run(sandbox.exec(["python3", "-c", empty])).output) <= 16 * MIB // 4096
    run(sandbox.stop())


def test_cpu_time_of_a_process(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(cpu_seconds=1)))
    result = run(sandbox.exec(["python3", "-c", "while True: pass"]))
    assert (result.exit_code, result.timed_out) == (128 + 24, False)
    ignoring = "import signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass"
    assert run(sandbox.exec(["python3", "-c", ignoring])).exit_code == 137
    run(sandbox.stop())


ALLOCATE = "python3 -c 'b = bytearray(300 << 20); b[::4096] = bytes(len(b[::4096])); print(len(b))'"


def test_who_dies_for_want_of_the_machines_memory_is_no_failed_command(
    backend: BubblewrapBackend, run: Callable
) -> None:
    """The group above the sandbox's stands for the machine: in it, there is less than the sandbox may have."""
    sandbox = run(backend.start({}, SandboxLimits(memory_bytes=1024 * MIB)))
    if sandbox._group is None:
        pytest.skip("without control groups, nobody knows for whose memory a process was killed")
    name = "memory.limit_in_bytes" if sandbox._group._version == 1 else "memory.max"
    above = sandbox._group.folders[0].parent / name
    usual = above.read_text()
    above.write_text(str(200 * MIB))
    try:
        with pytest.raises(SandboxError, match="the machine's memory ran out"):
            run(sandbox.shell(f"{ALLOCATE}; true"))
        with pytest.raises(SandboxError, match="the machine's memory ran out"):
            run(sandbox.shell("true"))
    finally:
        above.write_text(usual)
        run(sandbox.stop())
    # Its own limit is its own affair.
    sandbox = run(backend.start({}, SandboxLimits(memory_bytes=128 * MIB, disk_bytes=32 * MIB)))
    assert run(sandbox.shell(ALLOCATE)).exit_code == 137
    assert run(sandbox.shell("echo on")).output == b"on\n"
    run(sandbox.stop())


def test_lifetime(backend: BubblewrapBackend, run: Callable) -> None:
    sandbox = run(backend.start({}, SandboxLimits(lifetime_s=1.0)))
    began = time.monotonic()
    with pytest.raises(SandboxError, match="lifetime of 1 s"):
        run(sandbox.shell("sleep 20"))
    assert time.monotonic() - began < 5
    with pytest.raises(SandboxError, match="lifetime of 1 s"):
        run(sandbox.read("x"))
    run(sandbox.stop())


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (SandboxLimits(memory_bytes=MIB), "memory_bytes"),
        (SandboxLimits(disk_bytes=10), "disk_bytes"),
        (SandboxLimits(memory_bytes=256 * MIB), "disk_bytes=.*at most half of memory_bytes=268435456"),
        (SandboxLimits(num_processes=0), "num_processes"),
        (SandboxLimits(lifetime_s=0), "lifetime_s"),
        (SandboxLimits(cpu_seconds=-1), "cpu_seconds"),
    ],
)
def test_a_limit_that_cannot_be_kept_stops_the_start(
    backend: BubblewrapBackend, run: Callable, limits: SandboxLimits, name: str
) -> None:
    with pytest.raises(SandboxStartError, match=name):
        run(backend.start({}, limits))


def test_files_that_do_not_fit_stop_the_start(backend: BubblewrapBackend, run: Callable) -> None:
    with pytest.raises(SandboxStartError, match="'big'.*space"):
        run(backend.start({"big": b"x" * 4 * MIB}, SandboxLimits(disk_bytes=MIB)))
    with pytest.raises(SandboxStartError, match="'/usr/x'"):
        run(backend.start({"/usr/x": b"x"}, SandboxLimits()))


def test_the_owners_umask_does_not_matter() -> None:
    code = """
import asyncio, os
from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("umask")
    try:
        sandbox = await backend.start({"a/b": b"x"}, SandboxLimits())
        return (await sandbox.shell("cat a/b; python3 -m pytest --version; touch /tmp/c")).output
    finally:
        await backend.close()

os.umask(0o077)
print(asyncio.run(main()))
"""
    repository = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("b'xpytest "), done.stderr
