"""Where control groups are made, on trees that look like /sys/fs/cgroup does on other machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envs.sandbox import limits
from envs.sandbox.limits import ControlGroup, ControlGroups, LimitError, shm_bytes


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup."""
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    # Root may write anywhere; ask for the mode instead, as an ordinary user meets it.
    monkeypatch.setattr(os, "access", lambda path, mode: bool(Path(path).stat().st_mode & 0o200))
    return tmp_path


def v2_group(path: Path, handed_down: str, writable: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text("cpu memory pids")
    (path / "cgroup.subtree_control").write_text(handed_down)
    (path / "cgroup.procs").write_text("")
    for entry in (path, path / "cgroup.subtree_control"):
        entry.chmod(0o755 if writable else 0o555)


def own(monkeypatch: pytest.MonkeyPatch, paths: dict[str, str]) -> None:
    monkeypatch.setattr(limits, "_own_paths", lambda: paths)


def test_version_1_stays_below_our_own_group(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for controller in ("memory", "pids", "cpuacct"):
        (root / controller / "mine").mkdir(parents=True)
        for folder in (root / controller, root / controller / "mine"):
            (folder / "cgroup.procs").write_text("")
    own(monkeypatch, {"memory": "/mine", "pids": "/", "cpuacct": "/not/visible/here"})
    groups = ControlGroups.find("name")
    assert groups.folders == [root / "memory/mine/name", root / "pids/name", root / "cpuacct/name"]


def test_version_2_takes_the_nearest_ancestor_that_hands_controllers_down(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2_group(root / "user.slice/session-1.scope", "", writable=False)
    v2_group(root / "user.slice", "memory pids", writable=True)
    v2_group(root, "cpu memory pids", writable=True)
    own(monkeypatch, {"": "/user.slice/session-1.scope"})
    assert ControlGroups.find("name").folders == [root / "user.slice/name"]


def test_version_2_empties_a_delegated_group(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2_group(root / "run-1.scope", "", writable=True)
    v2_group(root, "", writable=False)
    (root / "run-1.scope/cgroup.procs").write_text("11\n12\n")
    own(monkeypatch, {"": "/run-1.scope"})
    assert ControlGroups.find("name").folders == [root / "run-1.scope/name"]
    assert (root / "run-1.scope/cgroup.subtree_control").read_text() == "+memory +pids"
    assert (root / "run-1.scope/composer.main/cgroup.procs").read_text() == "12"
    root.chmod(0o755)


def test_nothing_writable_names_the_limits_and_the_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2_group(root / "session.scope", "", writable=False)
    v2_group(root, "memory pids", writable=False)
    own(monkeypatch, {"": "/session.scope"})
    with pytest.raises(LimitError, match=r"memory_bytes and num_processes.*systemd-run --user --scope -p Delegate=yes"):
        ControlGroups.find("name")
    root.chmod(0o755)
    (root / "cgroup.controllers").unlink()
    with pytest.raises(LimitError, match="no writable control groups"):
        ControlGroups.find("name")


def test_limits_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "memory.swap.max").write_text("max")
    ControlGroup([tmp_path], 2).limit(10 * 4096 + 5, 7)
    # The stand-in keeps what was written; the kernel would round down to 40960, which is taken for the same.
    assert (tmp_path / "memory.max").read_text() == "40965"
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert (tmp_path / "pids.max").read_text() == "11"


def test_a_limit_that_does_not_take_effect_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "memory.max").symlink_to("/dev/null")
    with pytest.raises(LimitError, match="memory_bytes=4096"):
        ControlGroup([tmp_path], 2).limit(4096, 7)


def test_usage_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "memory.peak").write_text("8192\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "cgroup.procs").write_text("1\n2\n3\n")
    usage = ControlGroup([tmp_path], 2).usage()
    assert (usage.peak_memory_bytes, usage.cpu_seconds, usage.num_processes) == (8192, 2.5, 3)


@pytest.mark.parametrize(
    ("events", "was_robbed"),
    [
        ("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", False),
        ("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n", False),  # it had used up its own
        ("low 0\nhigh 0\nmax 7\noom 0\noom_kill 1\n", True),
    ],
)
def test_who_is_killed_within_its_limit_was_robbed_in_version_2(tmp_path: Path, events: str, was_robbed: bool) -> None:
    (tmp_path / "memory.events").write_text(events)
    assert ControlGroup([tmp_path], 2).was_robbed() is was_robbed


@pytest.mark.parametrize(
    ("killed", "peak", "was_robbed"), [(0, 100 << 20, False), (1, 127 << 20, False), (1, 100 << 20, True)]
)
def test_who_is_killed_within_its_limit_was_robbed_in_version_1(
    tmp_path: Path, killed: int, peak: int, was_robbed: bool
) -> None:
    (tmp_path / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}\n")
    (tmp_path / "memory.max_usage_in_bytes").write_text(f"{peak}\n")
    (tmp_path / "memory.limit_in_bytes").write_text(f"{128 << 20}\n")
    assert ControlGroup([tmp_path], 1).was_robbed() is was_robbed


def test_of_a_group_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    assert not ControlGroup([tmp_path / "gone"], 2).was_robbed()


def test_shared_memory_gets_a_quarter_of_the_disk_up_to_64_mib() -> None:
    assert shm_bytes(100) == 25
    assert shm_bytes(2**30) == 64 * 2**20
