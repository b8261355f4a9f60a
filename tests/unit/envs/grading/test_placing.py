"""From one state of a sandbox's files to another; with real programs in plain folders."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from composer.errors import GradingError
from envs.grading.placing import DoesNotFitError, bring_to, put

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from image_stand_in import FolderSandbox  # noqa: E402

BASE = {"a.py": b"a", "d/x.py": b"x", "tests/t.py": b"t", "file": b"f"}


@pytest.fixture
def sandbox():
    sandbox = FolderSandbox(BASE)
    yield sandbox
    asyncio.run(sandbox.stop())


def bring(sandbox, state):
    asyncio.run(bring_to(sandbox, BASE, state, "t/train/0"))
    assert asyncio.run(sandbox.files()) == state


def test_what_changed_is_written_and_what_is_gone_goes(sandbox):
    bring(sandbox, {"a.py": b"new", "d/x.py": b"x", "tests/t.py": b"t", "more/y.py": b"y"})
    assert sorted(sandbox.written) == ["a.py", "more/y.py"]


def test_files_and_folders_take_each_others_places(sandbox):
    bring(sandbox, {"a.py/inner": b"now a folder", "d": b"now a file", "tests/t.py": b"t", "file": b"f"})


def test_nothing_is_written_through_a_link_of_the_image(sandbox):
    (sandbox.work / "link").symlink_to("tests")
    (sandbox.work / "alias").symlink_to("a.py")
    (sandbox.work / "unrelated").symlink_to("tests")
    bring(sandbox, {**BASE, "link/t.py": b"forged", "alias": b"forged"})
    assert (sandbox.work / "tests/t.py").read_bytes() == b"t"
    assert (sandbox.work / "unrelated").is_symlink()


def test_odd_names_go_too(sandbox):
    odd = {**BASE, "-rf": b"", "a b\n*": b"", "\udcff": b""}
    for path in odd.keys() - BASE.keys():
        (sandbox.work / path).write_bytes(b"")
    asyncio.run(bring_to(sandbox, odd, BASE, "t"))
    assert asyncio.run(sandbox.files()) == BASE


class Full(FolderSandbox):
    async def write(self, path, content):
        raise OSError(28, "No space left on device")


def test_what_does_not_fit_is_told_from_what_may_not_be_written(sandbox):
    full = Full(BASE)
    with pytest.raises(DoesNotFitError, match="a.py does not fit: No space left on device"):
        asyncio.run(put(full, "a.py", b"x", "t/train/0"))
    asyncio.run(full.stop())
    with pytest.raises(GradingError, match=r"/closed/x of task t/train/0 cannot be put"):
        asyncio.run(put(sandbox, "/closed/x", b"x", "t/train/0"))
