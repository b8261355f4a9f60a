"""Snapshots and forks of Docker sandboxes, and what is refused as one."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from composer.contract import SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.snapshots import MANIFEST

pytestmark = pytest.mark.docker

LOOK = "find . /tmp -mindepth 1 -printf '%p %y %m %U %TY-%Tm-%Td %l\\n' | sort; cat a/data; cat /tmp/t"


@pytest.fixture(scope="module")
def backend(run: Callable, docker_engine: str, docker_image: str) -> Iterator[DockerBackend]:
    backend = DockerBackend("snapshots", docker_image, host=docker_engine)
    yield backend
    run(backend.close())


def test_a_fork_has_the_files_and_nothing_else(backend: DockerBackend, run: Callable) -> None:
    one = run(backend.start({"a/data": bytes(range(256))}, SandboxLimits()))
    run(
        one.shell(
            "echo t > /tmp/t; chmod 700 a; chmod 4755 a/data; ln -s a/data link; ln a/data hard; mkdir -m 555 closed; "
            "touch -d 2001-02-03 a/data; touch -d 2001-02-03 closed; (sleep 300 &); X=1; cd a"
        )
    )
    two = run(one.fork())
    before, after = run(one.shell(f"cd ~/project; {LOOK}")).output, run(two.shell(LOOK)).output
    lines = after.split(b"\n")
    assert b"./a/data f 4755 1000 2001-02-03 " in lines and b"./closed d 555 1000 2001-02-03 " in lines
    assert before == after
    assert run(two.shell("echo $X; pwd")).output == b"\n/home/dev/project\n"
    assert run(two.stats()).num_processes == 1
    run(two.shell("echo 2 > new; rm link"))
    run(one.shell("echo 1 > mine"))
    assert b"new" not in run(one.shell("ls")).output.split() and b"mine" not in run(two.shell("ls")).output.split()
    assert two.id != one.id
    run(one.stop())
    assert run(two.read("new")) == b"2\n"
    run(two.stop())


def test_a_snapshot_is_used_many_times_and_then_dropped(backend: DockerBackend, run: Callable) -> None:
    first = run(backend.start({"f": b"1", "g": b"g"}, SandboxLimits()))
    snapshot = run(first.snapshot())
    run(first.write("f", b"2"))
    run(first.stop())
    for _ in range(2):
        sandbox = run(backend.start({"f": b"3"}, SandboxLimits(), base=snapshot))
        assert run(sandbox.files()) == {"f": b"3", "g": b"g"}
        run(sandbox.stop())
    sandbox = run(backend.start({}, SandboxLimits(), base=snapshot))
    run(backend.drop(snapshot))
    run(backend.drop(snapshot))
    assert run(sandbox.files()) == {"f": b"1", "g": b"g"}
    run(sandbox.stop())
    with pytest.raises(SandboxStartError, match="no snapshot"):
        run(backend.start({}, SandboxLimits(), base=snapshot))


def test_a_snapshot_that_does_not_fit_stops_the_start(backend: DockerBackend, run: Callable) -> None:
    sandbox = run(backend.start({"big": b"x" * 2**22}, SandboxLimits()))
    snapshot = run(sandbox.snapshot())
    run(sandbox.stop())
    with pytest.raises(SandboxStartError, match="space"):
        run(backend.start({}, SandboxLimits(disk_bytes=2**20), base=snapshot))
    run(backend.drop(snapshot))


def test_a_saved_snapshot_is_loaded_by_another_backend(
    backend: DockerBackend, run: Callable, docker_engine: str, docker_image: str, tmp_path: Path
) -> None:
    sandbox = run(backend.start({"f": b"1"}, SandboxLimits()))
    run(sandbox.shell("mkdir d; chmod 2750 d; touch /tmp/su; chmod 6755 /tmp/su"))
    snapshot = run(sandbox.snapshot())
    run(sandbox.stop())
    run(backend.save(snapshot, tmp_path / "s.tar"))
    assert [path.name for path in tmp_path.iterdir()] == ["s.tar"]
    other = DockerBackend("other", docker_image, host=docker_engine)
    loaded = run(other.load(tmp_path / "s.tar"))
    assert loaded.image == backend._prepared._values[docker_image].made_from
    sandbox = run(other.start({}, SandboxLimits(), base=loaded))
    assert run(sandbox.files()) == {"f": b"1"}
    # What a file may do that nobody has written here is taken away.
    assert run(sandbox.shell("stat -c %a d /tmp/su")).output == b"750\n755\n"
    run(other.close())
    with pytest.raises(SandboxStartError):
        run(other.start({}, SandboxLimits(), base=loaded))
    run(other.close())
    with pytest.raises(SandboxError, match="no snapshot"):
        run(backend.save(Snapshot("none"), tmp_path / "t.tar"))
    with pytest.raises(OSError, match="No such file"):
        run(backend.save(snapshot, tmp_path / "none" / "t.tar"))
    run(backend.drop(snapshot))
    assert [path.name for path in tmp_path.iterdir()] == ["s.tar"]


def test_a_state_of_a_built_image_is_loaded_by_a_process_that_built_none(
    backend: DockerBackend, run: Callable, docker_engine: str, docker_image: str, tmp_path: Path
) -> None:
    run(run(backend.start({}, SandboxLimits())).stop())
    made = backend._prepared._values[docker_image].made_from
    assert made.startswith("composer-image:")
    (tmp_path / "Dockerfile").write_text(f"FROM {made}\nENV MADE_BY=dockerfile\n")
    image = f"dockerfile:{tmp_path}/Dockerfile"
    look = "echo $MADE_BY; cat f"

    async def save() -> None:
        sandbox = await backend.start({"f": b"1"}, SandboxLimits(), image=image)
        await backend.save(await sandbox.snapshot(), tmp_path / "s.state")
        await sandbox.stop()

    async def load(**arguments: str) -> bytes:
        other = DockerBackend("other", **{"image": docker_image, **arguments}, host=docker_engine)
        try:
            snapshot = await other.load(tmp_path / "s.state")
            sandbox = await other.start({}, SandboxLimits(), base=snapshot)
            # And what comes of it can be saved again.
            await other.save(await sandbox.snapshot(), tmp_path / "t.state")
            assert (await other.load(tmp_path / "t.state")).image.startswith("composer-image:")
            return (await sandbox.shell(look)).output
        finally:
            await other.close()

    run(save())
    built = backend._prepared._values[image]
    assert run(load()) == b"dockerfile\n1"
    # The Dockerfile has changed since: the state goes on in what it had started from.
    (tmp_path / "Dockerfile").write_text(f"FROM {made}\nENV MADE_BY=another\n")
    assert run(load()) == b"dockerfile\n1"
    # On an engine that does not have it, it is made again by who names it itself, and by nobody else.
    client = docker.APIClient(docker_engine)
    for name in (built.name, built.made_from):
        client.remove_image(name, force=True)
    client.close()
    with pytest.raises(SandboxError, match="is not on this engine any more: take the engine"):
        run(load())
    assert run(load(image=image)) == b"another\n1"


def entry(name: str, type: bytes = tarfile.REGTYPE, mode: int = 0o644, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = type, mode, linkname
    return info


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (entry("/home/dev/x"), "plain relative"),
        (entry("home/dev/../../etc/x"), "plain relative"),
        (entry("etc/passwd"), "cannot write"),
        (entry("home/developer"), "cannot write"),
        (entry("tmp/disk", tarfile.BLKTYPE), "device"),
        (entry("tmp/tty", tarfile.CHRTYPE), "device"),
        (entry("tmp/link", tarfile.LNKTYPE, linkname="/etc/passwd"), "hard link"),
    ],
)
def test_an_archive_that_no_sandbox_made_is_refused(
    backend: DockerBackend, run: Callable, tmp_path: Path, bad: tarfile.TarInfo, why: str
) -> None:
    path = tmp_path / "bad.tar"
    manifest = b'{"format": "composer-docker-snapshot-1", "image": "some/image:1"}'
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        first = entry(MANIFEST)
        first.size = len(manifest)
        tar.addfile(first, io.BytesIO(manifest))
        tar.addfile(entry("tmp/good"))
        tar.addfile(bad)
    with pytest.raises(SandboxError, match=why):
        run(backend.load(path))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no snapshot"),
        (b"x" * 5000, "no snapshot"),
        (b'{"format": "composer-docker-snapshot-1", "image": "dockerfile:/etc/Dockerfile"}', "names the image"),
        (b'{"format": "composer-docker-snapshot-2", "image": "some/image"}', "another format"),
        (b"[]", "another format"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused(
    backend: DockerBackend, run: Callable, tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "bad.tar"
    if content[:1] in (b"{", b"["):
        first = entry(MANIFEST)
        first.size = len(content)
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            tar.addfile(first, io.BytesIO(content))
    else:
        path.write_bytes(content)
    with pytest.raises(SandboxError, match=why):
        run(backend.load(path))
    with pytest.raises(OSError, match="No such file"):
        run(backend.load(tmp_path / "none"))
