"""Which folders are covered in sandboxes, and when a backend refuses to be made instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from composer.errors import ConfigError
from envs.sandbox import private
from envs.sandbox.bubblewrap import BubblewrapBackend


@pytest.fixture
def usr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /usr; the working directory is elsewhere."""
    usr = tmp_path / "usr"
    for folder in ("src/linux", "local/src", "bin", "lib/python3/dist-packages", "local/lib/python3.11/dist-packages"):
        (usr / folder).mkdir(parents=True)
    monkeypatch.setattr(private, "_SOURCES", (str(usr / "src"), str(usr / "local/src"), str(usr / "none")))
    monkeypatch.chdir(tmp_path)
    return usr


def hidden(usr: Path) -> list[str]:
    return [os.path.relpath(folder, usr) for folder in private.folders_to_hide([str(usr)])]


def test_sources_are_covered_and_packages_of_others_are_not(usr: Path) -> None:
    assert hidden(usr) == ["local/src", "src"]


@pytest.mark.parametrize("mark", ["composer/contract.py", "envs/sandbox/x.py"])
def test_an_installation_of_the_product_is_covered(usr: Path, mark: str) -> None:
    file = usr / "local/lib/python3.11/dist-packages" / mark
    file.parent.mkdir(parents=True)
    file.touch()
    assert hidden(usr) == ["local/lib/python3.11/dist-packages", "local/src", "src"]


def test_what_python_imports_from_is_covered(usr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (usr / "local/venv/lib/python3.11/site-packages").mkdir(parents=True)
    (usr / "plugins").mkdir()
    monkeypatch.syspath_prepend(str(usr / "local/venv/lib/python3.11/site-packages"))
    monkeypatch.syspath_prepend(str(usr / "lib/python3/dist-packages"))
    monkeypatch.syspath_prepend(str(usr / "plugins"))
    monkeypatch.syspath_prepend(str(usr / "plugins.zip"))
    assert hidden(usr) == [
        "lib/python3/dist-packages",
        "local/src",
        "local/venv/lib/python3.11/site-packages",
        "plugins",
        "src",
    ]


def test_the_working_directory_is_covered_once(usr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, more in (("local/app", ["local/app"]), ("src/linux", [])):
        (usr / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(usr / folder)
        assert hidden(usr) == sorted(["local/src", "src", *more])


@pytest.mark.parametrize("folder", ["/usr", "/usr/local", "/usr/bin", "/usr/local/lib"])
def test_a_working_directory_that_sandboxes_need_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=f"^working directory='{folder}': .* start composer in another folder$"):
        BubblewrapBackend("label")


def test_a_project_that_cannot_be_hidden_is_refused(usr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "__file__", str(usr / "envs/sandbox/private.py"))
    with pytest.raises(ConfigError, match=f"^project='{usr}': .* move composer's folder to another place$"):
        hidden(usr)


def test_a_folder_of_imports_that_cannot_be_hidden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/usr/share")
    with pytest.raises(ConfigError, match=r"^sys.path='/usr/share': .* take it out of PYTHONPATH"):
        BubblewrapBackend("label")


def test_the_base_python_keeps_its_library_and_loses_its_packages() -> None:
    library = Path(os.__file__).resolve().parent
    folders = private.folders_to_hide([str(library.parent)])
    assert str(library / "site-packages") in folders or not (library / "site-packages").is_dir()
    assert not any(library.is_relative_to(folder) for folder in folders)
    assert sys.version_info[:2] == (3, 11)


def test_a_working_directory_that_is_gone_hides_nothing(usr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (usr / "gone").mkdir()
    monkeypatch.chdir(usr / "gone")
    (usr / "gone").rmdir()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert hidden(usr) == ["local/src", "src"]
