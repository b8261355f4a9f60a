"""Commands that can be pasted."""

import shlex
import socket
import sys
from pathlib import Path

import pytest

from composer.shell import as_typed, free_port, pasteable


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that PATH does not lead to."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "composer", "mlflow"):
        (folder / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", ["composer"])
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def test_a_program_beside_python_is_named_by_its_path(programs: Path) -> None:
    command = pasteable("mlflow", "ui", "--backend-store-uri", "sqlite:///a b.db")
    assert shlex.split(command) == [str(programs / "mlflow"), "ui", "--backend-store-uri", "sqlite:///a b.db"]


def test_a_program_is_named_as_it_was_called(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(programs.parent)
    monkeypatch.setattr(sys, "argv", ["bin/composer", "plan"])
    assert pasteable("composer", "resume=runs/1") == "bin/composer resume=runs/1"


def test_a_program_on_the_path_is_named_by_itself(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs))
    assert pasteable("composer", "~mix.phases.sft") == "composer '~mix.phases.sft'"


def test_a_program_that_is_nowhere_keeps_its_name(programs: Path) -> None:
    assert pasteable("ray") == "ray"


@pytest.mark.parametrize(
    ("override", "typed"),
    [("++a.b=1", "a.b=1"), ("+experiment=x", "experiment=x"), ("+mix@x=y", "+mix@x=y"), ("~a", "~a"), ("a=1", "a=1")],
)
def test_overrides_as_typed(override: str, typed: str) -> None:
    assert as_typed(override) == typed


def test_a_port_with_a_listener_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) > port
    assert free_port(port) == port
