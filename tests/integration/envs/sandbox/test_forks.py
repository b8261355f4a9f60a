"""Snapshots and forks of real sandboxes: same files, separate lives, and nothing of one in the other."""

import asyncio
import errno
import io
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer.contract import SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError, SnapshotGoneError
from envs.sandbox import archive
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.snapshots import MAX_LAYERS

Run = Callable[[Awaitable[Any]], Any]
LIMITS = SandboxLimits(memory_bytes=128 * 2**20, disk_bytes=16 * 2**20)


def test_a_fork_has_the_files_and_neither_sees_what_the_other_writes_then(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        parent = await backend.start({"a.txt": b"one\n", "gone.txt": b"x"}, LIMITS)
        await parent.shell(
            "rm gone.txt; mkdir -p sub; echo two > sub/b; chmod 640 sub/b; ln -s /etc/passwd link; cd sub"
        )
        child = await parent.fork()
        seen = await child.shell("pwd; find . | sort; stat -c '%a %U' sub/b; cat sub/b; readlink link")
        assert seen.output.decode().splitlines() == [
            "/home/dev/project", ".", "./a.txt", "./link", "./sub", "./sub/b", "640 dev", "two", "/etc/passwd",
        ]  # fmt: skip
        await parent.write("a.txt", b"parent")
        await child.write("a.txt", b"child")
        await child.write("new", b"")
        assert await parent.read("a.txt") == b"parent" and await child.read("a.txt") == b"child"
        assert (await parent.shell("ls /home/dev/project")).output == b"a.txt\nlink\nsub\n"
        await parent.stop()
        assert await child.read("sub/b") == b"two\n"
        await child.stop()

    run(example())


def test_what_was_removed_of_the_base_state_stays_removed(backend: BubblewrapBackend, run: Run) -> None:
    """Overlayfs marks names of lower layers that are gone, and folders that hide what is below them."""

    async def example() -> None:
        parent = await backend.start({}, LIMITS)
        made = await parent.shell(
            "rm ~/.bashrc && mkdir ~/d && rm -r ~/project/* 2>/dev/null; rm -rf ~/.profile; mkdir ~/.profile; ls -A ~"
        )
        child = await parent.fork()
        grandchild = await child.fork()
        for sandbox in (child, grandchild):
            assert (await sandbox.shell("ls -A ~")).output == made.output
            await sandbox.shell("rmdir ~/.profile")
            assert (await sandbox.shell("ls -d ~/.profile")).exit_code != 0
        assert (await parent.shell("ls -d ~/.profile")).exit_code == 0
        for sandbox in (parent, child, grandchild):
            await sandbox.stop()

    run(example())


def test_a_folder_that_was_made_anew_does_not_show_what_it_held_below(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        first = await backend.start({"d/old": b"old"}, LIMITS)
        second = await first.fork()
        await second.shell("rm -r d && mkdir d && touch d/new")
        third = await second.fork()
        assert (await third.shell("ls d")).output == b"new\n"
        fourth = await third.fork()
        assert (await fourth.shell("ls d; rm -r d; ls")).output == b"new\n"
        for sandbox in (first, second, third, fourth):
            await sandbox.stop()

    run(example())


def test_siblings_start_from_one_snapshot(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        prepared = await backend.start({"f": b"0"}, LIMITS)
        snapshot = await prepared.snapshot()
        await prepared.write("f", b"later")
        await prepared.stop()
        siblings = await asyncio.gather(*(backend.start({"own": b"%d" % i}, LIMITS, base=snapshot) for i in range(8)))
        await backend.drop(snapshot)
        for i, sibling in enumerate(siblings):
            assert await sibling.files() == {"f": b"0", "own": b"%d" % i}
            await sibling.write("f", b"%d" % i)
        assert [await s.read("f") for s in siblings] == [b"%d" % i for i in range(8)]
        with pytest.raises(SandboxStartError, match=f"snapshot '{snapshot.id}' is not there any more"):
            await backend.start({}, LIMITS, base=snapshot)
        await asyncio.gather(*(s.stop() for s in siblings))

    run(example())


@pytest.mark.timeout(120)
def test_forks_of_forks_beyond_the_most_layers(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        sandbox = await backend.start({"log": b""}, LIMITS)
        for i in range(MAX_LAYERS + 4):
            await sandbox.shell(f"echo {i} >> log; echo {i} > file{i}; rm -f file{i - 1}")
            child = await sandbox.fork()
            await sandbox.stop()
            sandbox = child
        assert await sandbox.read("log") == b"".join(b"%d\n" % i for i in range(MAX_LAYERS + 4))
        assert (await sandbox.shell("ls")).output == b"file%d\nlog\n" % (MAX_LAYERS + 3)
        await sandbox.stop()

    run(example())


def test_running_programs_are_not_copied_and_go_on(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        parent = await backend.start({}, LIMITS)
        await parent.shell("X=1; (while true; do date >> ticks; sleep 0.05; done) &")
        child = await parent.fork()
        assert (await child.shell('echo "[$X]"; jobs; grep -lx sleep /proc/[0-9]*/comm')).output == b"[]\n"
        before = len(await parent.read("ticks"))
        await asyncio.sleep(0.3)
        assert len(await parent.read("ticks")) > before
        assert (await parent.shell('echo "[$X]"')).output == b"[1]\n"
        await parent.stop()
        await child.stop()

    run(example())


def test_no_room_is_said_and_the_sandbox_goes_on(run: Run) -> None:
    async def example() -> None:
        backend = BubblewrapBackend("room", snapshot_bytes=2 * 2**20)
        try:
            sandbox = await backend.start({}, LIMITS)
            await sandbox.shell("head -c 4000000 /dev/zero > big")
            with pytest.raises(OSError) as caught:
                await sandbox.snapshot()
            assert caught.value.errno == errno.ENOSPC
            await sandbox.shell("head -c 1000000 /dev/zero > big")
            snapshot = await sandbox.snapshot()
            await sandbox.shell("head -c 1900000 /dev/zero > big")
            with pytest.raises(OSError):
                await sandbox.snapshot()
            await backend.drop(snapshot)
            await sandbox.snapshot()
        finally:
            await backend.close()

    run(example())


def test_a_tree_made_to_be_hard_to_copy(backend: BubblewrapBackend, run: Run) -> None:
    """Too deep, with names that no text has, without rights: an error that says so, or a whole copy."""

    async def example() -> None:
        sandbox = await backend.start({}, LIMITS)
        await sandbox.shell("mkdir c; echo secret > c/s; chmod 000 c/s c; touch $'\\xff\\n'; mkfifo p; ln -s / up")
        child = await sandbox.fork()
        assert (await child.shell("chmod 700 c; chmod 600 c/s; cat c/s; ls | wc -l")).output == b"secret\n5\n"
        await child.stop()
        code = "import os\nfor _ in range(1200):\n    os.mkdir('x')\n    os.chdir('x')"
        assert (await sandbox.exec(["python3", "-c", code])).exit_code == 0
        with pytest.raises(OSError) as caught:
            await sandbox.snapshot()
        assert caught.value.errno == errno.E2BIG
        assert (await sandbox.shell("echo alive")).output == b"alive\n"
        await sandbox.stop()

    run(example())


def test_links_that_move_while_a_copy_is_made_lead_nowhere(backend: BubblewrapBackend, run: Run) -> None:
    """A folder becomes a link to the snapshots of others and back, over and over."""

    async def example() -> None:
        other = await backend.start({"secret.txt": b"of another episode"}, LIMITS)
        kept = await other.snapshot()
        mallory = await backend.start({}, LIMITS)
        await mallory.shell(
            "mkdir -p a real; touch a/f; ln -s /snapshots real/l; "
            "(while true; do mv a b; ln -s /snapshots a; rm a; mv b a; done) 2>/dev/null &"
        )
        for _ in range(20):
            try:
                child = await mallory.fork()
            except OSError:
                continue
            found = await child.shell("grep -rl 'of another' / --include=secret.txt 2>/dev/null; ls -A a/ 2>/dev/null")
            assert b"secret" not in found.output
            await child.stop()
        await mallory.stop()
        await other.stop()
        await backend.drop(kept)

    run(example())


def test_a_sandbox_that_has_ended_has_no_snapshot(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        sandbox = await backend.start({}, LIMITS)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await sandbox.snapshot()
        with pytest.raises(SandboxError):
            await sandbox.fork()
        await backend.drop(Snapshot("no such"))

    run(example())


def test_a_snapshot_is_loaded_by_another_backend(backend: BubblewrapBackend, run: Run, tmp_path: Path) -> None:
    async def example() -> None:
        first = await backend.start({"d/old": b"old", "gone": b""}, LIMITS)
        second = await first.fork()
        await second.shell("rm -r d gone ~/.bashrc; mkdir d; echo new > d/new; ln -s / up; chmod 600 d/new; mkfifo p")
        snapshot = await second.snapshot()
        await backend.save(snapshot, tmp_path / "kept.tar")
        listing = await second.shell("cd ~; find . -printf '%p %M %U %s %l\\n' | sort")
        for sandbox in (first, second):
            await sandbox.stop()
        other = BubblewrapBackend("other")
        try:
            loaded = await other.load(tmp_path / "kept.tar")
            again = await other.start({}, LIMITS, base=loaded)
            found = await again.shell("cd ~; find . -printf '%p %M %U %s %l\\n' | sort")
            assert found.output == listing.output and b"./project/d/new -rw------- 1000 4" in found.output
            assert b".bashrc" not in found.output
        finally:
            await other.close()
        await backend.drop(snapshot)
        with pytest.raises(SandboxError, match="not there any more"):
            await backend.save(snapshot, tmp_path / "again.tar")
        assert [path.name for path in tmp_path.iterdir()] == ["kept.tar"]

    run(example())


def test_an_archive_that_was_tampered_with_reaches_nothing(
    backend: BubblewrapBackend, run: Run, tmp_path: Path
) -> None:
    """Names that lead out, links that lead out, devices, set-uid programs."""

    def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
        made = tarfile.TarInfo(name)
        made.type, made.mode = kind, 0o644
        for field, value in fields.items():
            setattr(made, field, value)
        content = b"evil" if kind == tarfile.REGTYPE else b""
        made.size = len(content)
        return made, content

    async def example() -> None:
        bystander = await backend.start({"mine": b"mine"}, LIMITS)
        kept = await bystander.snapshot()
        for number, members in enumerate(
            (
                [member("../00001/home/dev/project/mine"), member("/skel/home/dev/evil"), member("ok")],
                [member("l", tarfile.SYMTYPE, linkname="/skel/home/dev"), member("l/evil")],
                [member("l", tarfile.SYMTYPE, linkname="../../skel/home/dev"), member("l/evil")],
                [member("mem", tarfile.CHRTYPE, devmajor=1, devminor=1)],
                [member("su", mode=0o4755, uid=0)],
            )
        ):
            layer = io.BytesIO()
            with tarfile.open(fileobj=layer, mode="w") as inner:
                for made, content in members:
                    inner.addfile(made, io.BytesIO(content))
            archive.pack(tmp_path / str(number), [layer])
            try:
                loaded = await backend.load(tmp_path / str(number))
            except SandboxError as error:
                assert str(tmp_path / str(number)) in str(error)
                continue
            sandbox = await backend.start({}, LIMITS, base=loaded)
            owner = await sandbox.shell("test -e /su && /su; stat -c %u /su 2>/dev/null")
            assert b"0" not in owner.output.split()
            await sandbox.stop()
        fresh = await backend.start({}, LIMITS)
        assert (await fresh.shell("ls -A ~ /; grep -rl evil / 2>/dev/null")).output.count(b"evil") == 0
        sibling = await backend.start({}, LIMITS, base=kept)
        assert await sibling.files() == {"mine": b"mine"}
        for sandbox in (bystander, fresh, sibling):
            await sandbox.stop()

    run(example())


def test_a_snapshot_that_is_dropped_takes_no_memory(run: Run) -> None:
    def mounted() -> int:
        assert backend._server is not None
        [server] = psutil.Process(backend._server.watchdog).children()
        return Path(f"/proc/{server.pid}/mountinfo").read_text().count(" /snapshots/")

    async def until(count: int) -> None:
        while mounted() != count:
            await asyncio.sleep(0.01)

    async def example() -> None:
        sandbox = await backend.start({}, LIMITS)
        snapshots = [await sandbox.snapshot() for _ in range(8)]
        assert mounted() == 8
        child = await backend.start({}, LIMITS, base=snapshots[0])
        for snapshot in snapshots:
            await backend.drop(snapshot)
        await until(1)  # the child may be forked
        await child.stop()
        await until(0)

    backend = BubblewrapBackend("memory")
    try:
        run(example())
    finally:
        run(backend.close())


def test_a_snapshot_is_not_taken_for_one_of_a_backend_that_began_anew(backend: BubblewrapBackend, run: Run) -> None:
    async def example() -> None:
        own = BubblewrapBackend("anew", python=False)
        try:
            first = await (await own.start({"a": b"old"}, LIMITS)).snapshot()
            await own.close()
            second = await (await own.start({"a": b"new"}, LIMITS)).snapshot()
            assert first != second
            with pytest.raises(SnapshotGoneError, match="is not there any more"):
                await own.start({}, LIMITS, base=first)
            assert await (await own.start({}, LIMITS, base=second)).read("a") == b"new"
        finally:
            await own.close()

    run(example())


def test_snapshots_with_a_layer_in_common_are_saved_at_once(
    backend: BubblewrapBackend, run: Run, tmp_path: Path
) -> None:
    """As those of all siblings of a group are, who start from one prepared state."""

    async def example() -> None:
        parent = await backend.start({"large": bytes(8 * 2**20), "a": b"0"}, LIMITS)
        base = await parent.snapshot()
        siblings = [await backend.start({"a": b"%d" % i}, LIMITS, base=base) for i in range(3)]
        snapshots = [await sibling.snapshot() for sibling in siblings]
        await asyncio.gather(*(backend.save(s, tmp_path / str(i)) for i, s in enumerate(snapshots)))
        for i in range(3):
            loaded = await backend.load(tmp_path / str(i))
            sandbox = await backend.start({}, LIMITS, base=loaded)
            assert await sandbox.read("a") == b"%d" % i
            await backend.drop(loaded)
            await sandbox.stop()
        for one in (parent, *siblings):
            await one.stop()
        for one in (base, *snapshots):
            await backend.drop(one)

    run(example())


def test_many_states_are_loaded_at_once(backend: BubblewrapBackend, run: Run, tmp_path: Path) -> None:
    """As all siblings of an interrupted group do."""

    async def example() -> None:
        sandbox = await backend.start({"a": b"1"}, LIMITS)
        await backend.save(await sandbox.snapshot(), tmp_path / "s")
        loaded = await asyncio.gather(*(backend.load(tmp_path / "s") for _ in range(5)))
        kept = await asyncio.gather(*(sandbox.snapshot() for _ in range(3)), backend.load(tmp_path / "s"))
        assert len({one.id for one in [*loaded, *kept]}) == 9
        for one in (*loaded, *kept):
            await backend.drop(one)
        await sandbox.stop()

    run(example())
