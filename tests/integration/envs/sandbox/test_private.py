"""A product that lies in /usr, where sandboxes see everything: what it is made of stays out of sight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[4]
LOOK = """
import asyncio, sys
from composer.types import Split
from composer.contract import SandboxLimits
from envs.grading.pytest_grader import PytestGrader
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.tasks import micro

async def main():
    assert micro.__file__.startswith(sys.argv[1]), micro.__file__
    backend, taskset = BubblewrapBackend("private"), micro.MicroTaskset()
    sandbox = await backend.start({}, SandboxLimits())
    look = "ls -A /usr/src /usr/local/src; find / -name micro.py -o -name secret.txt; /usr/bin/env bash --version"
    print((await sandbox.shell(look)).output.decode())
    task = taskset.task(Split.TRAIN, 0)
    await PytestGrader().check(task, taskset.reference(task), backend)
    print("graded")
    await backend.close()

asyncio.run(main())
"""
PLACES = ["/usr/src/app", "/usr/local/src/app", "/usr/local/app", "/usr/local/lib/python3.11/dist-packages"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="not root, or no unshare(1)")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_a_product_in_usr_is_not_seen(tmp_path: Path, place: str, where: str) -> None:
    """In a mount namespace of its own, /usr/local and /usr/src are this test's to write."""
    upper = "".join(
        f"mkdir -p {tmp_path}/{n}/u {tmp_path}/{n}/w; "
        f"mount -t overlay o -o lowerdir={folder},upperdir={tmp_path}/{n}/u,workdir={tmp_path}/{n}/w {folder}; "
        for n, folder in enumerate(("/usr/src", "/usr/local"))
    )
    copy = f"mkdir -p {place} && cp -r {REPO}/composer {REPO}/envs {place} && echo secret > {place}/secret.txt"
    script = f'set -e; mount -t tmpfs t {tmp_path}; {upper} {copy}; cd "$1"; shift; exec "$@"'
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            "sh",
            place if where == "there" else "/",
            sys.executable,
            "-c",
            LOOK,
            place,
        ],
        env=os.environ | {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("find: ")]
    assert lines[:2] == ["/usr/local/src:", "/usr/src:"] and lines[2].startswith("GNU bash"), done.stdout
    assert lines[-1] == "graded"
