"""States that are saved with variables, and what is refused as one."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from composer.errors import SandboxError
from envs.sandbox.variables import pack, unpacked

VARIABLES = {"PATH": "/opt/x:/usr/bin", "QUOTED": "it's $HOME\n"}


def entry(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    if kind == tarfile.SYMTYPE:
        info.size, info.linkname = 0, "/etc/passwd"
    return info, io.BytesIO(content)


def write(path: Path, *entries: tuple[tarfile.TarInfo, io.BytesIO]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in entries:
            tar.addfile(info, content)
    return path


def note(**fields: object) -> bytes:
    return json.dumps({"format": "composer-variables-1", "variables": VARIABLES, **fields}).encode()


def test_a_state_comes_back_with_its_variables(tmp_path: Path) -> None:
    state = tmp_path / "made"
    state.write_bytes(bytes(range(256)) * 5)
    pack(tmp_path / "s.state", VARIABLES, state)
    state.unlink()
    with unpacked(tmp_path / "s.state") as (inside, variables):
        assert inside.read_bytes() == bytes(range(256)) * 5 and variables == VARIABLES
    assert [path.name for path in tmp_path.iterdir()] == ["s.state"]  # nothing beside it
    with pytest.raises(FileNotFoundError):
        pack(tmp_path / "t.state", VARIABLES, tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["s.state"]


@pytest.mark.parametrize("content", [b"", b"no archive", b"x" * 5000])
def test_what_has_no_variables_is_the_state_itself(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with unpacked(tmp_path / "s") as found:
        assert found == (tmp_path / "s", {})
    archive = write(tmp_path / "a.tar", entry("composer-snapshot.json", b"{}"), entry("tmp/x", b"x"))
    with unpacked(archive) as found:
        assert found == (archive, {})


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (entry("composer-variables.json", note(format="composer-variables-2")), "its format is"),
        (entry("composer-variables.json", note(variables={"A B": "x"})), "no texts"),
        (entry("composer-variables.json", note(variables={"A": 1})), "no texts"),
        (entry("composer-variables.json", note(variables={"A": "x\0y"})), "no texts"),
        (entry("composer-variables.json", note(variables=["A"])), "no texts"),
        (entry("composer-variables.json", b"[]"), "saved with variables"),
        (entry("composer-variables.json", b"{"), "saved with variables"),
        (entry("composer-variables.json", b"", tarfile.SYMTYPE), "saved with variables"),
    ],
)
def test_a_note_that_is_none_is_refused(tmp_path: Path, first: tuple[tarfile.TarInfo, io.BytesIO], why: str) -> None:
    first[1].seek(0)
    with pytest.raises(SandboxError, match=why), unpacked(write(tmp_path / "s", first, entry("state", b"x"))):
        pass


def test_the_state_is_a_plain_file(tmp_path: Path) -> None:
    good = entry("composer-variables.json", note())
    for others in ([], [entry("other", b"x")], [entry("state", b"", tarfile.SYMTYPE)]):
        good[1].seek(0)
        with pytest.raises(SandboxError, match="it holds no state"), unpacked(write(tmp_path / "s", good, *others)):
            pass
    good[1].seek(0)
    whole = write(tmp_path / "s", good, entry("state", b"x" * 5000)).read_bytes()
    (tmp_path / "s").write_bytes(whole[:4000])
    with pytest.raises(SandboxError, match="saved with variables"), unpacked(tmp_path / "s"):
        pass
    with pytest.raises(OSError, match="No such file"), unpacked(tmp_path / "none"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
