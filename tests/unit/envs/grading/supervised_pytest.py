"""Runs a real pytest as a command under grading does: with the plugin that supervises it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from envs.grading.reporter import COMMAND, ORIGINS, TESTS

REPORTER = Path(__file__).parents[4] / "envs" / "grading" / "reporter.py"
NONCE = b"0123456789abcdef0123456789abcdef"


def run(tmp_path: Path, main: str, test: str, *arguments: str, nonce: bytes = NONCE, conftest: str = ""):
    """Exit code, report and output of `pytest` in a folder, as a command would start it."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "plugins" / "supervisor_x.py").write_text(REPORTER.read_text())
    (tmp_path / "plugins" / f"supervisor_x{ORIGINS}.py").write_text(REPORTER.with_name("origins.py").read_text())
    if conftest:
        (tmp_path / "work" / "conftest.py").write_text(conftest)
    digests = {str(tmp_path / "work" / "test_it.py"): hashlib.sha256(test.encode()).hexdigest()}
    (tmp_path / "plugins" / f"supervisor_x{TESTS}").write_text(json.dumps(digests))
    (tmp_path / "work" / "main.py").write_text(main)
    (tmp_path / "work" / "test_it.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path / "work",
        input=nonce,
        env={**os.environ, COMMAND: "on", "PYTEST_ADDOPTS": "-p supervisor_x", "PYTHONPATH": str(tmp_path / "plugins")},
        capture_output=True,
        timeout=60,
        check=False,
    )
    _, found, report = done.stdout.partition(b"\n" + NONCE)
    return done.returncode, json.loads(report) if found else None, done.stdout.decode() + done.stderr.decode()
