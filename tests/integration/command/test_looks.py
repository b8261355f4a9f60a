"""`composer audit` and `composer tasks check`, on real sandboxes."""

import json
from pathlib import Path

import pytest

from composer.cli import main


def test_an_audit_says_what_shows_and_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("shows  seccomp ") for line in lines)
    assert any(line.startswith("ok     host name ") for line in lines)
    assert " of the 39 tells by which backends are compared give its sandboxes away" in lines[-1]


def test_a_sound_taskset_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", "env=coding", f"run_root={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "folder/train/slug" in shown and "folder/evaluation/ledger" in shown
    report = json.loads((tmp_path / "tasks-coding.json").read_text())
    assert [task["verdict"] for task in report["tasks"]] == ["ok", "ok"]


def test_an_unsound_one_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "tasks/wrong"
    for name, text in (
        ("request.md", "Make f right."),
        ("files/main.py", "def f():\n    return 1\n"),
        ("solution/main.py", "def f():\n    return 2\n"),
        ("tests/test_main.py", "from composer_solution import call\n\ndef test_f():\n    assert call('main.f') == 1\n"),
    ):
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    path = f"env.taskset.args.path={tmp_path}/tasks"
    assert main(["tasks", "check", "env=coding", path, f"run_root={tmp_path}"]) == 1
    assert "trivial" in capsys.readouterr().out
    assert json.loads((tmp_path / "tasks-coding.json").read_text())["tasks"][0]["verdict"] == "trivial"


def test_a_taskset_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", "env=coding", f"env.taskset.args.path={tmp_path}/none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("composer: env.taskset.args.path=") and error.count("\n") == 1
