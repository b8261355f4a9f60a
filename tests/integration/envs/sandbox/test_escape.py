"""What holds sandboxes of one backend apart from each other and from the host, beyond their own namespaces: no program
in a sandbox ever gets a descriptor of its supervisor's, and if it did, no way would lead on from there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer.contract import SandboxLimits
from envs.sandbox.bubblewrap import BubblewrapBackend

# Looks for folders among the descriptors of every process that begins, as fast as it can.
WATCHER = b"""
import os, sys, time

end = time.time() + 60
found, looked = open("/tmp/found", "w", buffering=1), 0
number = int(open("/proc/loadavg").read().split()[-1]) + 1
while time.time() < end and not os.path.exists("/tmp/enough"):
    for pid in range(number, number + 6):
        if not os.path.exists(f"/proc/{pid}/fd"):
            continue
        looked += 1
        for fd in range(3, 40):
            try:
                names = os.listdir(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY))
            except OSError:
                continue
            found.write(f"{pid} {fd} {names[:5]}\\n")
    last = int(open("/proc/loadavg").read().split()[-1])
    number = last - 1 if last >= number + 6 else number
open("/tmp/looked", "w").write(str(looked))
"""


def below(pid: int) -> list[int]:
    """A process's descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


@pytest.mark.parametrize("command", [["true"], ["python3", "-m", "pytest", "--version"]], ids=["program", "pytest"])
def test_no_program_meets_its_supervisors_descriptors(runner, backend, command: list[str]) -> None:
    async def scenario() -> tuple[bytes, bytes]:
        sandbox = await backend.start({"watch.py": WATCHER}, SandboxLimits())
        await sandbox.shell("setsid python3 watch.py >/tmp/errors 2>&1 & sleep 0.3")
        for _ in range(40):
            await sandbox.exec(command)
        await sandbox.shell("touch /tmp/enough; for _ in $(seq 100); do [ -f /tmp/looked ] && break; sleep 0.1; done")
        found = await sandbox.read("/tmp/found"), await sandbox.read("/tmp/looked")
        await sandbox.stop()
        return found

    found, looked = runner.run(scenario())
    assert int(looked) > 0, "it was looked at no process"
    assert found == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into supervisors")
def test_from_supervisors_descriptors_no_way_leads_up(runner, backend) -> None:
    async def scenario() -> list[str]:
        sandbox = await backend.start({"test_x.py": b"def test(): pass\n"}, SandboxLimits())
        await sandbox.exec(["python3", "-m", "pytest", "-q"])  # a second supervisor
        bad, folders = [], 0
        for pid in below(os.getpid()):
            status = Path(f"/proc/{pid}/status").read_text()
            if f"Uid:\t{Path(f'/proc/{pid}').stat().st_uid}" in status and "CapEff:\t0000000000000000" not in status:
                continue  # the owner, the watchdog, the fork server, the launcher and bwrap
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if not fd.is_dir():
                    continue
                folders += 1
                if not os.path.samestat(fd.stat(), (fd / "..").stat()):
                    bad.append(f"{status.splitlines()[0]} {fd} {fd.readlink()}")
        await sandbox.stop()
        assert folders, "supervisors have no folder open: this test looks at nothing"
        return bad

    assert runner.run(scenario()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into the fork server")
def test_what_sandboxes_are_made_of_is_read_only(runner, backend: BubblewrapBackend) -> None:
    async def scenario() -> None:
        sandbox = await backend.start({}, SandboxLimits())
        roots = {root for pid in below(os.getpid()) if (root := Path(f"/proc/{pid}/root")).joinpath("skel").is_dir()}
        assert roots
        for root in roots:
            for folder in ("skel", "usr"):
                assert os.statvfs(root / folder).f_flag & os.ST_RDONLY, root / folder
        await sandbox.stop()

    runner.run(scenario())


def test_a_group_of_thousands_is_listed_whole(runner, backend) -> None:
    """More than fits in a page: who is not listed is not killed."""

    async def scenario() -> int:
        sandbox = await backend.start({}, SandboxLimits(num_processes=1500))
        many = "import subprocess; [subprocess.Popen(['sleep', '60']) for _ in range(1100)]"
        await sandbox.exec(["python3", "-c", many], timeout_s=120)
        listed = (await sandbox.stats()).num_processes
        await sandbox.stop()
        return listed

    assert runner.run(scenario()) >= 1100
