"""Repositories' names and files, the choice of commands, scripts, and folders of records."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import Counter

import pytest

from composer.autoinstall.commands import Command
from composer.autoinstall.proposer import choose
from composer.autoinstall.record import DROPPED, Output
from composer.autoinstall.repository import RepositoryError, name_of, read_repository
from composer.autoinstall.script import RUN, Script
from composer.contract import SandboxLimits, ToolResult
from composer.errors import MachineError
from composer.types import ToolCall


def read(source, max_bytes=2**20):
    # Folders need no sandbox.
    return asyncio.run(read_repository(str(source), None, SandboxLimits(), max_bytes))  # pyright: ignore[reportArgumentType]


def test_a_folder_is_read_as_bytes_and_its_git_is_left_alone(tmp_path):
    root = tmp_path / "shop"
    (root / "src").mkdir(parents=True)
    (root / ".git" / "hooks").mkdir(parents=True)
    (root / ".git" / "config").write_text("[core]\n\tfsmonitor = touch /tmp/trap\n")
    (root / "src" / "a.py").write_bytes(b"\xff\0")
    (root / "link.py").symlink_to("src/a.py")
    (root / "out").symlink_to("/etc/hostname")
    (root / "loop").symlink_to("loop")
    (root / "folder").symlink_to("src")
    os.mkfifo(root / "pipe")
    (root / "x.pyc").write_bytes(b"x")
    repository = read(root)
    assert repository.files == {"src/a.py": b"\xff\0", "link.py": b"\xff\0"}
    assert repository.left_out == ("folder", "loop", "out", "pipe")


def test_a_folder_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(RepositoryError, match=r"more than 10 bytes: raise autoinstall\.max_repository_bytes"):
        read(tmp_path, 10)


def test_the_hash_of_a_repository_is_of_paths_and_contents(tmp_path):
    for name, files in {"a": {"x": "1", "y": "2"}, "b": {"x": "1", "y": "2"}, "c": {"x": "2", "y": "1"}}.items():
        for path, content in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / path).write_text(content)
    a, b, c = (read(tmp_path / name).sha256 for name in "abc")
    assert a == b != c


def test_names_are_stable_and_apart(tmp_path):
    url = "https://example.org/team/shop.git"
    assert name_of(url) == "shop-ffe33b87" == name_of(url)
    names = {name_of(f"{tmp_path}/{place}") for place in ("a/shop", "b/shop", "shop.bundle", ".hidden", "x y")}
    assert len(names) == 5 and not any("/" in name or name.startswith(".") or " " in name for name in names)
    assert name_of(str(tmp_path / "shop")) == name_of(f"{tmp_path}/shop/")


def test_the_choice_is_by_chance_and_the_same_again():
    commands = [Command(str(i), "") for i in range(10)]
    first = choose(commands, 3, 0, "abc")
    assert first == choose(commands, 3, 0, "abc") and len(first) == 3
    assert [int(c.command) for c in first] == sorted(int(c.command) for c in first)
    counts = Counter(c.command for seed in range(400) for c in choose(commands, 3, seed, "abc"))
    # Each 120 times of 400 on average; the standard deviation is 9.2.
    assert len(counts) == 10 and all(75 < n < 165 for n in counts.values())
    assert choose(commands[:2], 3, 0, "abc") == commands[:2]


def test_a_script_does_again_what_worked(tmp_path):
    work = tmp_path / "it's work"
    work.mkdir()
    script = Script(str(work))
    script.add(ToolCall("shell", {"command": "mkdir deep\ncd deep"}), ToolResult(""))
    script.add(ToolCall("shell", {"command": "touch failed; false"}), ToolResult("", ok=False))
    script.add(ToolCall("read_file", {"path": "a"}), ToolResult("text"))
    script.add(ToolCall("write_file", {"path": "d/ü 'x'", "content": "EOF\n$HOME `id`\n"}), ToolResult("ok"))
    script.add(ToolCall("shell", {"command": "cat <<X > here\n$((1 + 1))\nX"}), ToolResult(""))
    place = tmp_path / "install.sh"
    place.write_text(script.text("shop", ["A"]))
    subprocess.run(["sh", "-c", RUN, "sh", str(place)], check=True)
    assert (work / "d" / "ü 'x'").read_text() == "EOF\n$HOME `id`\n"
    assert (work / "deep" / "here").read_text() == "2\n"
    assert not (work / "deep" / "failed").exists()


def test_a_record_is_there_whole_or_not_at_all(tmp_path):
    class Full:
        """A backend whose disk is full; nothing else of it is asked."""

        async def save(self, snapshot, path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    output = Output(tmp_path / "out")
    with output.opened():
        with pytest.raises(MachineError, match="No space left on device"):
            asyncio.run(output.write(DROPPED, "shop", {}, files={"a": b""}, snapshot=(Full(), None)))  # pyright: ignore[reportArgumentType]
        assert not output.finished("shop") and not list((tmp_path / "out" / DROPPED).iterdir())
        asyncio.run(output.write(DROPPED, "shop", {"reason": "häß: #1"}, files={"a/b": b"x"}))
        assert output.finished("shop") == DROPPED
        assert output.read(DROPPED, "shop") == {"format": 1, "reason": "häß: #1"}
        with pytest.raises(MachineError, match="another command works there"), Output(tmp_path / "out").opened():
            pass
    (tmp_path / "out" / ".partial-x").mkdir()
    with output.opened():
        assert not (tmp_path / "out" / ".partial-x").exists()
