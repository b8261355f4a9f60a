"""Machines that forbid what sandboxes are made of: one plain error, quickly, and nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[4]
START = """
import asyncio
from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("forbidden", python=False)
    try:
        await backend.start({}, SandboxLimits())
    except SandboxStartError as e:
        print(e)
    await backend.close()

backend = BubblewrapBackend("forbidden", python=False)
print([finding.ok for finding in backend.check() if finding.name in ("user namespaces", "sandbox")])
asyncio.run(main())
"""


def run(prefix: list[str], tmp_path: Path) -> list[str]:
    """Try to start a sandbox behind a program that takes something away; returns what was printed."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "XDG_RUNTIME_DIR": str(tmp_path)}
    began = time.monotonic()
    done = subprocess.run(
        [*prefix, sys.executable, "-c", START],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 30
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[]]
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare(1)")
def test_no_user_namespaces(tmp_path: Path) -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    found, error = run(["unshare", "-Ur", "sh", "-c", forbid, "sh"], tmp_path)
    assert found == "[False, False]"
    assert "user.max_user_namespaces=0 forbids them" in error
    assert "sysctl -w user.max_user_namespaces=15000" in error


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("capsh") is None, reason="not root, or no capsh(1)")
def test_root_in_a_default_container(tmp_path: Path) -> None:
    found, error = run(["capsh", "--drop=cap_sys_admin", "--shell=/usr/bin/env", "--"], tmp_path)
    assert found == "[True, False]"
    assert "does not let us make namespaces" in error
    assert "--cap-add SYS_ADMIN" in error
