"""Bad input to the whole command: one plain sentence that names the thing and the remedy, and nothing left behind.

What stops before anything starts is tested with the parts; here are inputs that only show on a machine or in a run.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SMALL = [
    "mix.phases.pretrain.tokens=20480",
    "mix.phases.sft.tokens=35840",
    "mix.phases.sft.warmup_steps=1",
    "mix.sessions.num_sessions=64",
    "evaluation.num_tasks=2",
    "evaluation.samples_per_task=2",
    "algorithm.num_steps=2",
    "algorithm.warmup_steps=0",
    "algorithm.groups_per_step=1",
    "algorithm.group_size=2",
    "algorithm.min_start_average=0",
]


def composer(folder: Path, *overrides: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "composer", f"run_root={folder / 'runs'}", *SMALL, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def check_sentence(result: subprocess.CompletedProcess[str], exit_code: int, *parts: str) -> None:
    assert result.returncode == exit_code, result.stdout
    assert "Traceback" not in result.stdout
    sentences = [line for line in result.stdout.splitlines() if line.startswith("composer: ")]
    assert any(all(part in line for part in parts) for line in sentences), result.stdout


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["mix.codebase.kind=files", "mix.codebase.path=/nowhere"],
            ["mix.codebase.path", "'/nowhere' is not there", "correct mix.codebase.path"],
        ),
        (["model.tokenizer=/nowhere"], ["model.tokenizer", "'/nowhere' is not there"]),
    ],
    ids=["missing corpus", "missing tokenizer"],
)
def test_what_is_not_on_the_machine_stops_the_run_before_it_starts(tmp_path, overrides, parts):
    check_sentence(composer(tmp_path, *overrides), 3, *parts)


def test_limits_that_leave_no_room_for_an_episode_stop_the_run_before_it_starts(tmp_path):
    result = composer(tmp_path, "mix.phases.sft.seq_len=64")
    check_sentence(result, 2, "mix.phases.sft.seq_len=64", "the session of the expert on task micro/train/0", "raise")
    assert "starting Ray" not in result.stdout


def test_an_unreadable_tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{")
    result = composer(tmp_path, f"model.tokenizer={folder}", "env.chat_template=own")
    check_sentence(result, 1, f"model.tokenizer='{folder}'", "cannot be read", "give a Hugging Face tokenizer folder")


@pytest.mark.slow
def test_a_loss_that_is_not_finite(tmp_path):
    result = composer(
        tmp_path,
        "mix.phases.pretrain.learning_rate=1e30",
        "mix.phases.pretrain.max_grad_norm=1e30",
        "mix.phases.pretrain.warmup_steps=0",
    )
    check_sentence(result, 1, "is not finite", "a new run with a lower learning_rate", "checkpoints")
    assert "composer resume=" in result.stdout


@pytest.mark.slow
def test_a_task_whose_tests_cannot_run(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from envs.tasks.micro import MicroTaskset\n"
        "import dataclasses\n\n\n"
        "class Broken(MicroTaskset):\n"
        "    def task(self, split, index):\n"
        "        task = super().task(split, index)\n"
        "        return dataclasses.replace(task, hidden_tests={})\n"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "composer",
            f"run_root={tmp_path / 'runs'}",
            *SMALL,
            "plugins=[broken]",
            "env.taskset._target_=broken.Broken",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    check_sentence(result, 1, "micro/train/0")


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """A file system of its own that is nearly full: nothing finished is lost, and the sentence says what to do."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600m", "none", str(small)], check=True)
    try:
        filler = small / "filler"
        process = subprocess.Popen(
            [sys.executable, "-m", "composer", f"run_root={small / 'runs'}", *SMALL,
             "mix.phases.pretrain.tokens=400000", "mix.phases.pretrain.checkpoint_every=20"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        output = ""
        for line in process.stdout:
            output += line
            if "pretrain: " in line and not filler.exists():
                with filler.open("wb") as file:
                    try:
                        while True:
                            file.write(b"\0" * 2**20)
                    except OSError:
                        pass
        assert process.wait(60) == 3, output
        assert "Traceback" not in output
        assert "the disk is full" in output and "free space and resume" in output, output
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.slow
def test_sigterm_ends_a_run_as_ctrl_c_does_and_impatience_does_no_harm(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "composer", f"run_root={tmp_path / 'runs'}", *SMALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "pretrain: " in line:
            break
    started = time.monotonic()
    process.terminate()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output += process.stdout.read()
    assert process.wait(60) == 130, output
    assert time.monotonic() - started < 10
    assert "Traceback" not in output and "composer resume=" in output
    assert not list(Path(tempfile.gettempdir()).glob(f"composer-ray-{process.pid}-*"))
    [status] = (tmp_path / "runs").glob("*/*/status.json")
    assert '"interrupted"' in status.read_text()
