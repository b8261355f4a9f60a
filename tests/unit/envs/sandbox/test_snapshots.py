"""Which layers stay and which go, and the copy of a tree that somebody may have made to be hard to copy."""

import asyncio
import bz2
import errno
import io
import os
import resource
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from composer.contract import Snapshot
from composer.errors import SandboxError
from envs.sandbox import archive
from envs.sandbox.layers import copy_tree
from envs.sandbox.snapshots import Snapshots


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    here, there = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (source, target))
    try:
        copy_tree(here, there)
    finally:
        os.close(here)
        os.close(there)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_copy_has_contents_modes_times_and_links(tmp_path: Path) -> None:
    top = tmp_path / "a"
    (top / "deep/er").mkdir(parents=True)
    (top / "deep/er/file").write_bytes(bytes(range(256)) * 300)
    (top / "deep/er/file").chmod(0o640)
    os.utime(top / "deep/er/file", ns=(1_000_000_007, 2_000_000_009))
    os.link(top / "deep/er/file", top / "twin")
    (top / "link").symlink_to("/etc/passwd")
    (top / "closed").mkdir()
    (top / "closed/inside").touch()
    (top / "closed").chmod(0o500)
    os.mkfifo(top / "pipe", 0o600)
    os.utime(top / "deep", ns=(3_000_000_000, 4_000_000_000))
    before = open_files()

    copy(top, tmp_path / "b")

    assert open_files() == before
    copied = tmp_path / "b"
    assert (copied / "twin").read_bytes() == bytes(range(256)) * 300
    assert (copied / "twin").stat().st_ino == (copied / "deep/er/file").stat().st_ino
    assert stat.S_IMODE((copied / "twin").stat().st_mode) == 0o640
    assert (copied / "twin").stat().st_mtime_ns == 2_000_000_009
    assert (copied / "deep").stat().st_mtime_ns == 4_000_000_000  # though files were put below it
    assert str((copied / "link").readlink()) == "/etc/passwd"
    assert stat.S_IMODE((copied / "closed").stat().st_mode) == 0o500
    assert (copied / "closed/inside").exists()
    assert stat.S_ISFIFO((copied / "pipe").stat().st_mode)


def test_sparse_holes_are_no_reason_to_hang_and_sockets_are_left_out(tmp_path: Path) -> None:
    import socket

    (tmp_path / "a").mkdir()
    with (tmp_path / "a/sparse").open("wb") as file:
        file.truncate(2**20)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "a/socket"))
        copy(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["sparse"]
    assert (tmp_path / "b/sparse").stat().st_size == 2**20


def test_names_that_are_no_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / os.fsdecode(b"\xff\n \x80")).write_text("x")
    copy(tmp_path / "a", tmp_path / "b")
    assert [os.fsencode(path.name) for path in (tmp_path / "b").iterdir()] == [b"\xff\n \x80"]


@pytest.mark.parametrize(("depth", "fits"), [(900, True), (1100, False)])
def test_a_tree_deeper_than_pythons_stack(tmp_path: Path, depth: int, fits: bool) -> None:
    (tmp_path / "a").mkdir()
    # As the fork server does.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = open_files()
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    try:
        if fits:
            copy(tmp_path / "a", tmp_path / "b")
        else:
            with pytest.raises(OSError) as caught:
                copy(tmp_path / "a", tmp_path / "b")
            assert caught.value.errno == errno.E2BIG
        assert open_files() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.system(f"rm -rf '{tmp_path}/a' '{tmp_path}/b'")  # what pytest uses is recursive


@dataclass
class Server:
    """Stands in for the fork server: what `Snapshots` asks of it."""

    size: int = 10
    fails: bool = False
    asked: list[int] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    async def make_layer(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        if self.fails:
            raise OSError(errno.E2BIG, "too deep")
        self.asked.append(request["max_bytes"])
        return self.size

    def drop(self, snapshot: str) -> None:
        self.dropped.append(snapshot)


def add(snapshots: Snapshots, below: tuple[str, ...] = (), most: int = 2**20) -> Snapshot:
    return asyncio.run(snapshots.add(below, most, {"op": "copy"}))


def test_a_layer_stays_while_a_snapshot_or_a_sandbox_needs_it() -> None:
    server = Server()
    snapshots = Snapshots(server, 2**30)
    first = add(snapshots)
    chain = snapshots.chain(first)
    assert chain == ("00001",)
    snapshots.hold(chain)  # a sandbox starts from it
    snapshots.drop(first)
    snapshots.drop(first)
    assert snapshots.chain(first) is None and server.dropped == []

    second = add(snapshots, chain)  # of that sandbox
    assert snapshots.chain(second) == ("00001", "00002")
    snapshots.release(chain)  # it ends
    assert server.dropped == []
    snapshots.drop(second)
    assert server.dropped == ["00001", "00002"]


def test_all_together_have_a_bound() -> None:
    server = Server(size=2**20 - 2**17)
    snapshots = Snapshots(server, 2**20)
    first = add(snapshots, most=2**30)
    assert server.asked == [2**20]
    with pytest.raises(OSError) as caught:
        add(snapshots)
    assert caught.value.errno == errno.ENOSPC and server.dropped == []
    snapshots.drop(first)
    add(snapshots)


def test_a_copy_that_fails_takes_no_room() -> None:
    server = Server(fails=True)
    snapshots = Snapshots(server, 2**20)
    for _ in range(3):
        with pytest.raises(OSError):
            add(snapshots)
    assert server.dropped == ["00001", "00002", "00003"]
    server.fails = False
    assert add(snapshots).id == "00004"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({}, "snapshot.json"),
        ({"snapshot.json": b"{}"}, "format"),
        ({"snapshot.json": b'{"format": "other", "layers": 1}'}, "its format is 'other'"),
        ({"snapshot.json": b'{"format": "composer-bubblewrap-snapshot-1", "layers": 0}'}, "it has no layer"),
        ({"snapshot.json": b'{"format": "composer-bubblewrap-snapshot-1", "layers": 1}'}, "0.tar"),
        ({"snapshot.json": b"\xff"}, "utf-8"),
    ],
)
def test_what_is_no_saved_snapshot_is_named(members: dict[str, bytes], said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    with pytest.raises(SandboxError, match=str(path)) as caught, archive.unpacked(path, 2**20):
        pass
    assert said in str(caught.value)


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0" * 100 + b"x" * 5000)
    with pytest.raises(SandboxError, match="no saved snapshot"), archive.unpacked(tmp_path / "file", 2**20):
        pass


def test_a_small_file_cannot_fill_the_disk(tmp_path: Path) -> None:
    """Neither compressed, nor with holes, nor with more than there is room for."""
    archive.pack(tmp_path / "large", [io.BytesIO(b"first"), io.BytesIO(b"x" * 100)])
    packed = (tmp_path / "large").read_bytes()
    (tmp_path / "compressed").write_bytes(bz2.compress(packed))
    sparse = tarfile.TarInfo("0.tar")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40), "GNU.sparse.name": "0.tar"}
    note = tarfile.TarInfo("snapshot.json")
    text = b'{"format": "composer-bubblewrap-snapshot-1", "layers": 1}'
    note.size = len(text)
    with tarfile.open(tmp_path / "sparse", "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(note, io.BytesIO(text))
        file.addfile(sparse)
    for name, said in (("large", "1.tar has 100 bytes, and 99 are left"), ("compressed", ""), ("sparse", "no plain")):
        with (
            pytest.raises(SandboxError, match=f"no saved snapshot.*{said}"),
            archive.unpacked(tmp_path / name, 104),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compressed", "large", "sparse"]


def test_layers_come_back_as_they_were_packed(tmp_path: Path) -> None:
    archive.pack(tmp_path / "file", [io.BytesIO(b"first"), io.BytesIO(b"")])
    with archive.unpacked(tmp_path / "file", 5) as layers:
        assert [layer.read() for layer in layers] == [b"first", b""]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_those_that_are_made_at_once_wait_for_room(tmp_path: Path) -> None:
    """Each may take all that is left, and takes little."""

    class Slow(Server):
        async def make_layer(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
            await asyncio.sleep(0.01)
            return await super().make_layer(request, fds)

    async def scenario() -> None:
        snapshots = Snapshots(Slow(), 2**20)
        made = await asyncio.gather(*(snapshots.add((), 2**20, {"op": "extract"}) for _ in range(3)))
        assert len({one.id for one in made}) == 3
        assert snapshots.server.asked == [2**20, 2**20 - 10, 2**20 - 20]
        # One that fails lets the next one in, and so does one that nobody waits for any more.
        snapshots.server.fails = True
        failed = await asyncio.gather(*(snapshots.add((), 2**20, {}) for _ in range(2)), return_exceptions=True)
        assert [error.errno for error in failed] == [errno.E2BIG] * 2
        snapshots.server.fails = False
        first, second = (asyncio.ensure_future(snapshots.add((), 2**20, {})) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        # Where nothing is being made, there is nothing to wait for.
        snapshots.max_bytes = 2**18
        with pytest.raises(OSError, match="No space"):
            await snapshots.add((), 2**20, {})

    asyncio.run(asyncio.wait_for(scenario(), 10))
