"""Owners and the sweep: real processes, real kills."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from launchers.base import OWNER_VARIABLE, Owner, sweep_processes, sweep_users_of

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def start(mark):
    process = subprocess.Popen(SLEEPER, env={**os.environ, OWNER_VARIABLE: mark}, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    return process


def dead_owner(label):
    process = subprocess.Popen(["true"])
    here = Owner.current(label)
    process.wait()
    return replace(here, pid=process.pid, start_time=here.start_time + 1)


def test_a_mark_can_be_read_back_and_nothing_else_can():
    owner = Owner.current("run-1")
    assert Owner.parse(owner.mark) == owner
    assert owner.alive
    for wrong in ("", "run-1", "run-1:12", "run-1:12:1", "run-1:x:1:1", ":1:2:3", "run-1:1:2:3:4"):
        assert Owner.parse(wrong) is None


def test_a_later_process_with_the_same_pid_is_not_the_owner():
    owner = Owner.current("run-1")
    assert not replace(owner, start_time=owner.start_time - 1).alive


def test_the_sweep_ends_orphans_and_leaves_live_runs_alone():
    orphan = start(dead_owner("sweep-test-dead").mark)
    live = start(Owner.current("sweep-test-live").mark)
    try:
        assert sweep_processes() >= 1
        assert not psutil.pid_exists(orphan.pid)
        assert psutil.pid_exists(live.pid)
        assert sweep_processes("sweep-test-live") == 1
        assert not psutil.pid_exists(live.pid)
    finally:
        for process in (orphan, live):
            process.kill()
            process.wait()


def test_a_run_in_another_container_is_left_alone():
    """Its driver's number means nothing here, where its processes are seen all the same."""
    dead = dead_owner("sweep-test-container")
    elsewhere = start(replace(dead, namespace=dead.namespace + 1).mark)
    try:
        sweep_processes()
        assert sweep_processes("sweep-test-container") == 0
        assert psutil.pid_exists(elsewhere.pid)
    finally:
        elsewhere.kill()
        elsewhere.wait()


def test_a_process_that_lost_its_mark_is_found_by_its_open_files(tmp_path):
    script = f"f = open({str(tmp_path / 'log')!r}, 'w'); " + SLEEPER[2]
    hidden = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        hidden.stdout.readline()
        assert sweep_users_of(tmp_path / "other") == 0
        assert sweep_users_of(tmp_path) == 1
        assert not psutil.pid_exists(hidden.pid)
    finally:
        hidden.kill()
        hidden.wait()


def test_semaphores_of_killed_processes_are_removed_by_their_tracker():
    script = (
        "import multiprocessing as m, time; l = m.get_context('spawn').Lock(); "
        "print(l._semlock.name, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, OWNER_VARIABLE: dead_owner("sweep-test-dead").mark},
        stdout=subprocess.PIPE,
    )
    try:
        semaphore = Path("/dev/shm") / f"sem.{process.stdout.readline().decode().strip().removeprefix('/')}"
        assert semaphore.exists()
        sweep_processes()
        assert not psutil.pid_exists(process.pid)
        deadline = time.monotonic() + 5
        while semaphore.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not semaphore.exists()
    finally:
        process.kill()
        process.wait()


def test_an_unmarked_process_is_never_touched():
    bystander = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE)
    try:
        bystander.stdout.readline()
        sweep_processes()
        time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
