"""The session's own guard (`tests/conftest.py`): what a test leaves running or in shared memory fails the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pathlib, subprocess

def test_tidy():
    subprocess.Popen(["true"]).wait()

def test_leaves_a_process_and_a_segment():
    pathlib.Path("/dev/shm/composer-left-NAME").touch()
    process = subprocess.Popen(["sleep", "61"], start_new_session=True, stdout=-3, stderr=-3)
    print("left behind:", process.pid)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in `folder` on the tests above, under the real conftest with a short patience."""
    (folder / "conftest.py").write_text(CONFTEST.read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.3"))
    (folder / "test_it.py").write_text(TESTS.replace("NAME", folder.name))
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--rootdir", folder, folder, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_leftovers_fail_the_session_and_are_named(tmp_path: Path) -> None:
    result = run(tmp_path)
    pid = int(result.stdout.split("left behind: ")[1].split()[0])
    try:
        assert result.returncode == 1
        assert "2 passed, 1 error" in result.stdout
        named = [line.removeprefix("E").strip() for line in result.stdout.splitlines() if line.startswith("E  ")]
        test = "PYTEST_CURRENT_TEST=test_it.py::test_leaves_a_process_and_a_segment (call)"
        assert f"process {pid}: sleep 61 ({test})" in named
        assert f"/dev/shm/composer-left-{tmp_path.name}" in named
    finally:
        os.kill(pid, signal.SIGKILL)
        Path(f"/dev/shm/composer-left-{tmp_path.name}").unlink()


def test_a_tidy_session_passes(tmp_path: Path) -> None:
    result = run(tmp_path, "-k", "tidy")
    assert (result.returncode, "1 passed" in result.stdout) == (0, True), result.stdout
