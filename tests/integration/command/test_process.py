"""The command as a process: exit codes, one plain line, nothing left behind."""

import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def composer(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "composer", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("arguments", [["plan", "+typo=1"], ["+typo=1"], ["-m", "seed=1,2", "+typo=1"], ["pln"]])
def test_a_wrong_word_is_one_line_and_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    result = composer(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "start", ["-m composer", "-c 'import sys; from composer.__main__ import main; sys.exit(main())'"]
)
def test_a_signal_under_the_imports_ends_it_without_a_traceback(
    start: str, number: signal.Signals, tmp_path: Path
) -> None:
    # A module that the command imports early stands still, as on a slow disk, and catches all as some libraries do.
    slow = "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    (tmp_path / "omegaconf.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, *shlex.split(start), "plan"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # `nohup make test` has it ignored, and the command rightly leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    with process:
        assert process.stdout and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130


def test_the_command_is_the_guarded_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"composer": "composer.__main__:main"}


def test_a_full_disk_or_a_read_only_run_root_is_said(tmp_path: Path) -> None:
    result = composer("run_root=/proc/nowhere", cwd=tmp_path)
    assert result.returncode == 3
    assert len(result.stderr.splitlines()) == 1
    assert "/proc/nowhere" in result.stderr and "run_root" in result.stderr


def test_a_plan_in_a_pipe_keeps_its_lines_whole(tmp_path: Path) -> None:
    result = composer("plan", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (ui,) = [line for line in result.stdout.splitlines() if "--backend-store-uri" in line]
    assert str(tmp_path / "runs" / "mlflow.db") in ui


def test_the_doctor_says_what_is_missing(tmp_path: Path) -> None:
    result = composer("doctor", "+experiment=composer2", "launcher=local", cwd=tmp_path)
    if "gpu" in result.stdout and not Path("/dev/nvidiactl").exists():
        assert result.returncode == 3
        assert "cannot run here yet" in result.stdout
        assert "would give" in result.stdout
    assert "Traceback" not in result.stderr


def test_the_doctor_finds_no_server(tmp_path: Path) -> None:
    result = composer("doctor", "tracking.uri=http://127.0.0.1:9", cwd=tmp_path)
    assert "nothing answers at http://127.0.0.1:9" in result.stdout
    assert "Traceback" not in result.stderr
