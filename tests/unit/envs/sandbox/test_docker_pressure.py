"""What a container's /proc says of an engine's machine, and when an engine is this machine's."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from composer.types import Pressure
from envs.sandbox.docker.pressure import free_bytes, in_words, is_here, pressure_of

MEMINFO = b"MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    4000000 kB\n"
STAT = b"cpu  9 9\ncpu0 1 2\ncpu1 1 2\ncpu2 1 2\ncpu3 1 2\nintr 5\nprocs_running 6\nprocs_blocked 0\n"
INFO = {"MemTotal": 16000000 * 1024, "NCPU": 4}


@pytest.mark.parametrize(
    ("memory", "threads", "info", "expected"),
    [
        (MEMINFO, STAT, INFO, Pressure(1.5, 4000000 * 1024, 7)),
        # A machine of the runtime's own: what it shows is not the engine's.
        (MEMINFO, STAT, {"MemTotal": 64 * 2**30, "NCPU": 64}, Pressure(None, None, 7)),
        (MEMINFO, STAT, {}, Pressure(None, None, 7)),
        (b"", b"", INFO, Pressure(None, None, 7)),
        (MEMINFO.replace(b"MemAvailable", b"Other"), STAT, INFO, Pressure(1.5, None, 7)),
    ],
)
def test_what_contradicts_the_engine_is_not_known(
    memory: bytes, threads: bytes, info: dict[str, int], expected: Pressure
) -> None:
    assert pressure_of(memory, threads, 7, info) == expected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [(b"40 1024\n", 40 * 1024), (b"stat: cannot read '/'\n", None), (b"stat: failed", None), (b"", None)],
)
def test_free_disk_is_what_stat_says(shown: bytes, expected: int | None) -> None:
    assert free_bytes(shown) == expected


def test_an_engine_is_here_only_if_all_of_it_is_alike() -> None:
    here = {
        "Name": socket.gethostname(),
        "KernelVersion": os.uname().release,
        "NCPU": os.cpu_count(),
        "MemTotal": psutil.virtual_memory().total,
    }
    assert is_here("unix:///run/docker.sock", here)
    assert not is_here("tcp://127.0.0.1:2375", here)
    for name in here:
        assert not is_here("unix:///tmp/forwarded.sock", {**here, name: "another"})


def test_nothing_known_is_said_in_words() -> None:
    assert in_words(Pressure(None, None, None)) == (
        "nothing is known; not known, and so never waited for: runnable threads, free memory, free disk"
    )
    assert "this machine" in in_words(None)
