"""What an image or a Dockerfile of somebody else's can take of this machine: bounded, and said in one sentence."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxStartError
from envs.sandbox.docker import images, prepared
from envs.sandbox.docker.backend import DockerBackend
from tests.integration.envs.sandbox.docker_image import root_file_system

pytestmark = pytest.mark.docker


def start(run: Callable, engine: str, image: str, **options) -> str:
    """Start a sandbox of an image, and stop it; returns why it could not be started."""

    async def once() -> str:
        backend = DockerBackend("test", image=image, host=engine, **options)
        try:
            await (await backend.start({}, SandboxLimits())).stop()
        except SandboxStartError as e:
            return str(e)
        finally:
            await backend.close()
        return ""

    return run(once())


def packed(target: Path, path: str, size: int) -> str:
    """A root file system with one file of zeros put into it."""
    with tarfile.open(root_file_system(False)) as source, tarfile.open(target, "w") as archive:
        for info in source:
            if info.name.strip("/") != path:
                archive.addfile(info, source.extractfile(info) if info.isreg() else None)
        info = tarfile.TarInfo(path)
        info.size, info.mode = size, 0o644
        archive.addfile(info, io.BytesIO(bytes(size)))
    return f"tarball:{target}"


@pytest.mark.parametrize(
    ("path", "bound", "message"),
    [
        ("etc/passwd", "_MOST_READ_BYTES", "/etc/passwd of the image"),
        ("home/dev/data", "_MOST_KEPT_BYTES", "the image"),
    ],
)
def test_what_an_image_holds_is_not_read_without_bound(
    run: Callable,
    docker_engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    bound: str,
    message: str,
) -> None:
    monkeypatch.setattr(prepared, bound, 2**18)
    taken, get = 0, docker.APIClient.get_archive

    def counted(self, *arguments, **options):
        chunks, stat = get(self, *arguments, **options)

        def passing():
            nonlocal taken
            for chunk in chunks:
                taken += len(chunk)
                yield chunk

        return passing(), stat

    monkeypatch.setattr(docker.APIClient, "get_archive", counted)
    why = start(run, docker_engine, packed(tmp_path / "root.tar", path, 2**25))
    assert f"{message}" in why and f"more than {2**18} bytes" in why
    assert taken < 2**24, "the rest was never taken from the engine"


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A folder whose Dockerfile can be built without a registry."""
    shutil.copy(root_file_system(False), tmp_path / "root.tar")
    (tmp_path / "Dockerfile").write_text(f"FROM scratch\nADD root.tar /\nENV PATH={prepared.USUAL_PATH}\n")
    return tmp_path


def test_a_build_has_no_network_and_little_memory(run: Callable, docker_engine: str, context: Path) -> None:
    script = """
        test $(wc -l </proc/net/dev) -eq 3 || exit 4
        groups=/sys/fs/cgroup
        most=$(cat $groups/memory/memory.limit_in_bytes 2>/dev/null || cat $groups/memory.max)
        test $most -eq MOST || exit 5
    """.replace("MOST", str(images._BUILD_LIMITS["memory"]))
    with (context / "Dockerfile").open("a") as file:
        file.write(f"RUN {json.dumps(['/bin/sh', '-c', script])}\n")
    assert start(run, docker_engine, f"dockerfile:{context / 'Dockerfile'}") == ""


def test_a_build_that_fails_says_that_it_has_no_network(run: Callable, docker_engine: str, context: Path) -> None:
    with (context / "Dockerfile").open("a") as file:
        file.write('RUN ["/bin/sh", "-c", "exit 3"]\n')
    why = start(run, docker_engine, f"dockerfile:{context / 'Dockerfile'}")
    assert "cannot be built" in why and "env.sandbox.args.build_network=true" in why


def test_a_build_without_an_end_is_ended(
    run: Callable, docker_engine: str, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_BUILD_S", 2.0)
    with (context / "Dockerfile").open("a") as file:
        file.write('RUN ["/bin/sh", "-c", "while :; do echo on; sleep 0.1; done"]\n')
    assert "it takes more than 2 s" in start(run, docker_engine, f"dockerfile:{context / 'Dockerfile'}")


def test_a_folder_to_build_from_has_bounds(
    run: Callable, docker_engine: str, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = f"dockerfile:{context / 'Dockerfile'}"
    with (context / "data").open("wb") as file:
        file.truncate(2**40)
    assert f"more than {2**30} bytes" in start(run, docker_engine, image)
    (context / "data").unlink()
    monkeypatch.setattr(images, "_MOST_CONTEXT_FILES", 0)
    assert "more than 0 entries" in start(run, docker_engine, image)
    os.mkfifo(context / ".dockerignore")
    assert ".dockerignore is no file" in start(run, docker_engine, image)
