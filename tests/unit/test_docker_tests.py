"""Docker tests run where an engine can be had, after those that fork; where there can be none, that is said loudly."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """The session's own tests/conftest.py."""
    path = str(Path(__file__).parents[1] / "conftest.py")
    return request.config.pluginmanager.get_plugin(path) or pytest.fail(f"{path} is no plugin of this session")


def script(folder: Path, text: str) -> Path:
    path = folder / "docker.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Reporter:
    """Stands in for pytest's own, to be read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stats: dict[str, list[Any]] = {}

    def section(self, title: str, **_: Any) -> None:
        self.lines.append(title)

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_an_engine_that_starts_is_used(conftest: Any, tmp_path: Path) -> None:
    config = SimpleNamespace(stash=pytest.Stash())
    starts = script(tmp_path, 'echo "noise" >&2; echo "unix://$2/docker.sock"')
    assert conftest.start_engine(starts, tmp_path / "e", config) == f"unix://{tmp_path}/e/docker.sock"
    reporter = Reporter()
    conftest.pytest_terminal_summary(reporter, config)
    assert reporter.lines == []


def test_every_reason_for_skipping_is_a_line_of_its_own(conftest: Any) -> None:
    reporter = Reporter()
    reasons = ("Skipped: swe-rex is not installed", "Skipped: no NVIDIA GPU", "Skipped: swe-rex is not\ninstalled")
    reporter.stats["skipped"] = [SimpleNamespace(longrepr=("test_x.py", 3, reason)) for reason in reasons]
    conftest.pytest_terminal_summary(reporter, SimpleNamespace(stash=pytest.Stash()))
    assert reporter.lines == [
        "3 tests were skipped",
        "skipped 1: no NVIDIA GPU",
        "skipped 2: swe-rex is not installed",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'no Docker engine for tests: dockerd needs root' >&2; exit 3", "dockerd needs root"),
        ("exec sleep 60", "none was there after 0.5 s"),
    ],
)
def test_where_there_can_be_none_the_session_says_so(
    conftest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setattr(conftest, "ENGINE_S", 0.5)
    config = SimpleNamespace(stash=pytest.Stash())
    with pytest.raises(pytest.skip.Exception, match=why):
        conftest.start_engine(script(tmp_path, text), tmp_path / "e", config)
    reporter = Reporter()
    conftest.pytest_terminal_summary(reporter, config)
    assert "NOT tested" in reporter.lines[0] and why in reporter.lines[1]


def test_a_script_that_breaks_is_no_reason_to_skip(conftest: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="broken"):
        conftest.start_engine(
            script(tmp_path, "echo broken >&2; exit 1"), tmp_path, SimpleNamespace(stash=pytest.Stash())
        )


def test_those_that_fork_come_first(conftest: Any) -> None:
    tests = Path(conftest.__file__).parent

    def item(path: str, *, docker: bool = False, forks: bool = False) -> Any:
        def run_ranks() -> None: ...

        module = SimpleNamespace(run_ranks=run_ranks) if forks else SimpleNamespace(x=1)
        marks = {"docker": object()} if docker else {}
        return SimpleNamespace(
            nodeid=path, path=tests / path, module=module, get_closest_marker=marks.get, add_marker=lambda mark: None
        )

    items = [
        item("benchmarks/test_a.py", docker=True),
        item("integration/test_run.py"),
        item("integration/envs/test_docker.py", docker=True),
        item("integration/models/test_parallel.py", forks=True),
        item("unit/test_a.py"),
        item("integration/rl/test_trainer.py", forks=True),
    ]
    conftest.pytest_collection_modifyitems(items)
    assert [one.nodeid for one in items] == [
        "unit/test_a.py",
        "integration/models/test_parallel.py",
        "integration/rl/test_trainer.py",
        "integration/envs/test_docker.py",
        "integration/test_run.py",
        "benchmarks/test_a.py",
    ]
    first = next(number for number, one in enumerate(items) if one.get_closest_marker("docker"))
    assert not any(map(conftest.forks_ranks, items[first:]))
    assert sum(map(conftest.forks_ranks, items)) == 2


def test_whoever_forks_ranks_is_known_by_the_functions_name() -> None:
    tests = Path(__file__).parents[1]
    files = [p for p in (tests / "integration").rglob("test_*.py") if "ranks" in p.read_text()]
    using = [p for p in files if re.search(r"\brun_ranks\(", p.read_text())]
    assert len(using) >= 3
    assert not [p for p in using if not re.search(r"^from \S+ import .*\brun_ranks\b", p.read_text(), re.MULTILINE)]
