"""Waiting for descriptors, of which a long run holds more than select(2) can count."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.shadow.service import ShadowBackend
from envs.waiting import ready

ROOT = Path(__file__).parents[3]
FD_SETSIZE = 1024
"""Descriptors from this number on are refused by select(2)."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """So many are open that the next one has a number that select(2) refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FD_SETSIZE + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * FD_SETSIZE, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while held[-1] < FD_SETSIZE:
            held.append(os.dup(held[0]))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_numbers_that_select_refuses() -> None:
    reading, writing = os.pipe()
    assert reading > FD_SETSIZE
    try:
        assert ready(reading, timeout_s=0) == []
        assert ready(writing, to_write=True) == [writing]
        os.write(writing, b"x")
        assert ready(reading) == [reading]
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.usefixtures("many_descriptors")
def test_the_shadow_backend_starts_in_a_process_with_many_descriptors() -> None:
    backend = ShadowBackend()
    try:
        backend.start()
        assert backend.is_running and backend.url
    finally:
        backend.stop()


def test_a_time_that_goes_by() -> None:
    reading, writing = os.pipe()
    try:
        before = time.monotonic()
        assert ready(reading, timeout_s=0.05) == []
        assert time.monotonic() - before >= 0.05
        assert ready(reading, timeout_s=-1.0) == []
    finally:
        os.close(writing)
    assert ready(reading, timeout_s=1e9) == [reading], "the other end hung up"
    os.close(reading)


def test_which_of_several() -> None:
    first, second = os.pipe(), os.pipe()
    try:
        os.write(second[1], b"x")
        assert ready(first[0], second[0]) == [second[0]]
    finally:
        for fd in (*first, *second):
            os.close(fd)


def test_nothing_here_waits_by_select() -> None:
    # In the sandbox, reporter.py looks at descriptor 0 alone.
    files = [file for folder in ("composer", "envs", "launchers") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if "select.select(" in file.read_text("utf-8")}
    assert found == {"envs/grading/reporter.py"}
