"""What `make` says before it installs anything."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def make(target: str, venv: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """`make` in this checkout for another environment, with further programs in front of the machine's."""
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(venv)}
    for name in ("EXTRAS", "FOR_A_RUN", "MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    return subprocess.run(
        ["make", "--no-print-directory", target],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An `unshare` that is refused."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (folder / "unshare").chmod(0o755)
    return folder


def test_a_run_that_no_sandbox_could_start_for_is_not_installed(tmp_path: Path, programs: Path) -> None:
    done = make("quickstart", tmp_path / "venv", programs)
    assert done.returncode == 2, done.stdout
    assert "set-up cannot go on: this machine does not let programs make user namespaces" in done.stdout
    assert "--privileged" in done.stdout and "make setup" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_set_up_alone_warns_and_goes_on(tmp_path: Path, programs: Path) -> None:
    taken = tmp_path / "venv"
    taken.mkdir()
    (taken / "mine").touch()  # where it goes on to, it stops
    done = make("setup", taken, programs)
    assert done.returncode == 2, done.stdout
    assert "set-up: warning: this machine does not let programs make user namespaces" in done.stdout
    assert f"set-up cannot go on: {taken} exists and is not a virtual environment" in done.stdout
    assert "make setup" not in done.stdout


def test_a_machine_that_allows_it_hears_nothing(tmp_path: Path, programs: Path) -> None:
    (programs / "unshare").write_text("#!/bin/sh\nexit 0\n")
    taken = tmp_path / "venv"
    taken.mkdir()
    (taken / "mine").touch()
    assert "namespaces" not in make("quickstart", taken, programs).stdout
