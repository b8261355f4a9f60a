"""The engine's side of Docker sandboxes: who cleans up, whose containers are whose, images, an engine in trouble."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import DockerBackend, owner

pytestmark = pytest.mark.docker

REPO = Path(__file__).resolve().parents[4]
OWNER = """
import asyncio, sys
from composer.contract import SandboxLimits
from envs.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend("owner", sys.argv[2], host=sys.argv[1])
    sandbox = await backend.start({}, SandboxLimits(lifetime_s=float(sys.argv[3])))
    print(sandbox.name, flush=True)
    await sandbox.shell("sleep 100", timeout_s=100)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def client(docker_engine: str) -> Iterator[docker.APIClient]:
    client = docker.APIClient(docker_engine)
    yield client
    client.close()


@pytest.fixture
def backend(run: Callable, docker_engine: str, small_docker_image: str) -> Iterator[DockerBackend]:
    backend = DockerBackend("engine", small_docker_image, host=docker_engine)
    yield backend
    run(backend.close())


def names(client: docker.APIClient) -> set[str]:
    return {name.strip("/") for container in client.containers(all=True) for name in container["Names"]}


def wait_for(condition: Callable[[], bool], timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def start_owner(docker_engine: str, small_docker_image: str) -> Iterator[Callable]:
    """Starts another process that owns a sandbox; gives it and the container's name."""
    started = []

    def start(lifetime_s: float) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, docker_engine, small_docker_image, str(lifetime_s)],
            cwd=REPO,
            text=True,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_sweep_removes_what_the_dead_left_and_nothing_of_the_living(
    backend: DockerBackend, client: docker.APIClient, start_owner: Callable
) -> None:
    (dead, dead_name), (_, live_name) = start_owner(300), start_owner(300)
    assert {dead_name, live_name} <= names(client)
    assert backend.sweep() == 0
    dead.kill()
    dead.wait()
    assert backend.sweep() == 1
    assert dead_name not in names(client) and live_name in names(client)
    assert backend.sweep() == 0


def test_sweep_leaves_other_machines_alone(
    backend: DockerBackend, client: docker.APIClient, run: Callable, small_docker_image: str
) -> None:
    run(run_and_stop(backend))  # so that there is an image
    backend.sweep()  # what other tests' owners left
    [image] = [i for i in client.images() for tag in i["RepoTags"] or [] if tag.startswith("composer-sandbox:")][:1]
    mine = owner.labels("x", "y")
    gone = mine | {"composer.pid": "4194305"}  # above the largest that Linux gives
    assert owner.is_dead(gone) and not owner.is_dead(mine)
    others = [
        gone | {"composer.boot": "another"},
        gone | {"composer.pid_namespace": "1"},
        {"composer.kind": "sandbox"},
    ]
    made = [client.create_container(image["Id"], ["true"], labels=labels)["Id"] for labels in others]
    ours = client.create_container(image["Id"], ["true"], labels=gone)["Id"]
    try:
        assert backend.sweep() == 1
        left = {container["Id"] for container in client.containers(all=True)}
        assert set(made) <= left and ours not in left
    finally:
        for container in made:
            client.remove_container(container, force=True)


async def run_and_stop(backend: DockerBackend) -> None:
    sandbox = await backend.start({}, SandboxLimits())
    assert (await sandbox.shell("echo 1")).output == b"1\n"
    await sandbox.stop()


def test_a_sandbox_whose_owner_was_killed_ends_with_its_lifetime(
    client: docker.APIClient, start_owner: Callable
) -> None:
    process, name = start_owner(3)
    process.kill()
    assert wait_for(lambda: name not in names(client))


def test_stop_removes_everything_and_may_be_called_twice(
    backend: DockerBackend, client: docker.APIClient, run: Callable
) -> None:
    sandbox = run(backend.start({}, SandboxLimits()))
    run(sandbox.shell("(setsid sleep 300 &); trap '' TERM"))
    assert sandbox.name in names(client)

    async def stop_twice_at_once() -> None:
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        await sandbox.stop()

    run(stop_twice_at_once())
    assert sandbox.name not in names(client)
    for call in (
        sandbox.shell("true"),
        sandbox.exec(["true"]),
        sandbox.read("x"),
        sandbox.write("x", b""),
        sandbox.files(),
        sandbox.stats(),
        sandbox.snapshot(),
        sandbox.fork(),
    ):
        with pytest.raises(SandboxError, match="stopped"):
            run(call)


def test_stop_during_a_command_ends_the_command(backend: DockerBackend, run: Callable) -> None:
    async def scenario() -> None:
        sandbox = await backend.start({}, SandboxLimits())
        for call in (sandbox.shell("sleep 30"), sandbox.exec(["sleep", "30"])):
            running = asyncio.ensure_future(call)
            await asyncio.sleep(0.5)
            await sandbox.stop()
            with pytest.raises(SandboxError, match="stopped"):
                await running

    run(scenario())


def test_a_start_that_is_cancelled_leaves_nothing(
    backend: DockerBackend, client: docker.APIClient, run: Callable
) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(backend.start({}, SandboxLimits()), 0.05)
        for seconds in (0.1, 0.2, 0.3, 0.4):  # some machines are done by then
            with contextlib.suppress(TimeoutError):
                await (await asyncio.wait_for(backend.start({}, SandboxLimits()), seconds)).stop()

    run(run_and_stop(backend))
    before = names(client)
    run(scenario())
    run(backend.close())
    assert names(client) <= before


def test_many_at_once(backend: DockerBackend, client: docker.APIClient, run: Callable) -> None:
    async def one(number: int) -> bytes:
        sandbox = await backend.start({"n": str(number).encode()}, SandboxLimits())
        try:
            await sandbox.shell("sleep 0.3")
            return (await sandbox.shell("cat n")).output
        finally:
            await sandbox.stop()

    async def scenario() -> list[bytes]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert run(scenario()) == [str(number).encode() for number in range(8)]
    assert not [name for name in names(client) if name.startswith("composer-engine-")]


def test_close_stops_all_and_the_backend_can_be_used_again(
    backend: DockerBackend, client: docker.APIClient, run: Callable
) -> None:
    run(backend.close())
    for _ in range(2):
        sandbox = run(backend.start({}, SandboxLimits()))
        run(backend.close())
        run(backend.close())
        assert sandbox.name not in names(client)
        with pytest.raises(SandboxError):
            run(sandbox.shell("true"))
        run(sandbox.stop())


def test_a_container_that_somebody_removes_is_an_error_at_once(
    backend: DockerBackend, client: docker.APIClient, run: Callable
) -> None:
    async def scenario() -> None:
        for how in (sandbox_command, sandbox_exec):
            sandbox = await backend.start({}, SandboxLimits())
            running = asyncio.ensure_future(how(sandbox))
            await asyncio.sleep(0.5)
            client.remove_container(sandbox.name, force=True)
            with pytest.raises(SandboxError, match="has ended"):
                await running
            with pytest.raises(SandboxError, match="has ended"):
                await sandbox.read("x")
            await sandbox.stop()

    async def sandbox_command(sandbox) -> None:  # noqa: ANN001
        await sandbox.shell("sleep 30")

    async def sandbox_exec(sandbox) -> None:  # noqa: ANN001
        await sandbox.exec(["sleep", "30"])

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began < 20


class Proxy:
    """Stands between a client and the engine, and can hang or die in its place."""

    def __init__(self, path: Path, target: str) -> None:
        self.address, self._target = f"unix://{path}", target.removeprefix("unix://")
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._server.accept()
                theirs = socket.socket(socket.AF_UNIX)
                theirs.connect(self._target)
            except OSError:
                return
            self._sockets += [ours, theirs]
            for one, two in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pump, args=(one, two), daemon=True).start()

    def _pump(self, one: socket.socket, two: socket.socket) -> None:
        try:
            while data := one.recv(2**16):
                self._open.wait()
                two.sendall(data)
            two.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def hang(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def die(self) -> None:
        self._server.close()
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._open.set()

    def close(self) -> None:
        self.die()
        for one in self._sockets:
            one.close()


@pytest.fixture
def proxy(tmp_path: Path, docker_engine: str) -> Iterator[Proxy]:
    if not docker_engine.startswith("unix://"):
        pytest.skip("the engine has no socket here")
    proxy = Proxy(tmp_path / "docker.sock", docker_engine)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("trouble", ["hang", "die"])
def test_an_engine_in_trouble_is_an_error_in_time(
    proxy: Proxy, run: Callable, client: docker.APIClient, small_docker_image: str, trouble: str
) -> None:
    backend = DockerBackend("trouble", small_docker_image, host=proxy.address, answer_s=1.0)

    async def scenario() -> list[str]:
        sandboxes = [await backend.start({}, SandboxLimits()) for _ in range(6)]
        running = [
            asyncio.ensure_future(call)
            for call in (
                sandboxes[0].shell("sleep 1; echo 1", timeout_s=2),
                sandboxes[1].exec(["sleep", "1"], timeout_s=2),
            )
        ]
        await asyncio.sleep(0.5)
        getattr(proxy, trouble)()
        began = time.monotonic()
        running += [
            asyncio.ensure_future(call)
            for call in (
                sandboxes[2].read("x"),
                sandboxes[3].exec(["true"]),
                sandboxes[4].files(),
                sandboxes[5].stats(),
                backend.start({}, SandboxLimits()),
            )
        ]
        await asyncio.wait(running, timeout=30)
        assert all(call.done() for call in running)
        errors = [call.exception() for call in running]
        assert all(isinstance(error, SandboxError) for error in errors), errors
        assert time.monotonic() - began < 25
        for sandbox in sandboxes:
            await sandbox.stop()
        return [str(error) for error in errors]

    errors = run(scenario())
    assert all("engine" in error or "answer" in error for error in errors), errors
    proxy.go_on()
    run(backend.close())

    def remove_all() -> bool:
        left = [name for name in names(client) if name.startswith("composer-trouble-")]
        return not [owner.remove(client, name) for name in left]

    assert wait_for(remove_all)


def test_without_an_engine_there_is_one_plain_sentence(run: Callable, tmp_path: Path) -> None:
    backend = DockerBackend("none", host=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxStartError, match="no engine runs there: start it, or name another"):
        run(backend.start({}, SandboxLimits()))
    [finding] = backend.check()
    assert not finding.ok and finding.remedy and "none.sock" in finding.detail
    assert backend.sweep() == 0
    run(backend.close())
    with pytest.raises(SandboxStartError, match="its address must begin with one of unix://, tcp://"):
        run(DockerBackend("odd", host="npipe://somewhere").start({}, SandboxLimits()))


def test_check_finds_that_sandboxes_start_here(backend: DockerBackend, run: Callable, docker_engine: str) -> None:
    async def scenario() -> bool:
        return all(finding.ok for finding in backend.check())

    assert {finding.name for finding in backend.check()} >= {"Docker engine", "seccomp", "sandbox"}
    assert run(scenario())
    absent = DockerBackend("absent", "composer.invalid/none:1", host=docker_engine)
    last = absent.check()[-1]
    assert last.ok and "is pulled when the first sandbox starts" in last.detail


def test_an_image_that_cannot_be_had_is_one_plain_sentence(
    backend: DockerBackend, run: Callable, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nNONSENSE\n")
    (tmp_path / "empty.tar").write_bytes(b"nothing")
    for image, why in (
        ("composer.invalid/none:1", r"is not on the Docker engine and cannot be pulled: .*check its name"),
        ("No Name", "is no name|cannot be pulled"),
        (f"dockerfile:{tmp_path}/none", "there is no such file"),
        (f"dockerfile:{tmp_path}/Dockerfile", "cannot be built: .*NONSENSE"),
        (f"tarball:{tmp_path}/none", "No such file"),
        (f"tarball:{tmp_path}/empty.tar", "cannot be imported"),
    ):
        with pytest.raises(SandboxStartError, match=why) as error:
            run(backend.start({}, SandboxLimits(), image=image))
        assert "\n" not in str(error.value)


def test_a_dockerfile_is_built_once_and_what_it_holds_is_the_users(
    run: Callable, client: docker.APIClient, docker_engine: str, small_docker_image: str, tmp_path: Path
) -> None:
    first = DockerBackend("small", small_docker_image, host=docker_engine)
    run(run_and_stop(first))
    run(first.close())
    [base] = [tag for i in client.images() for tag in i["RepoTags"] or [] if re.match("composer-image:", tag)][:1]
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "main.py").write_text("x = 1\n")
    (tmp_path / "repository" / "secret").write_text("x")
    (tmp_path / ".dockerignore").write_text("**/secret\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nENV COLOUR=blue\nCOPY repository /srv/code/\n")
    image = f"dockerfile:{tmp_path}/Dockerfile"
    backend = DockerBackend("built", image, workdir="/srv/code", host=docker_engine)
    before = len(client.images())
    for _ in range(2):
        (tmp_path / "repository" / "secret").write_text(str(time.monotonic()))  # which goes into nothing
        sandbox = run(backend.start({"new.py": b"y\n"}, SandboxLimits()))
        assert run(sandbox.files()) == {"main.py": b"x = 1\n", "new.py": b"y\n"}
        shown = run(sandbox.shell("echo $COLOUR; pwd; stat -c '%U %a' main.py; echo 2 > main.py; cat main.py")).output
        assert shown == b"blue\n/srv/code\ndev 644\n2\n"
        run(backend.close())
    after = len(client.images())
    assert after == before + 2  # the built and the prepared one
    (tmp_path / "repository" / "main.py").write_text("x = 3\n")
    sandbox = run(backend.start({}, SandboxLimits()))
    assert run(sandbox.files()) == {"main.py": b"x = 3\n"}
    run(backend.close())
    for tag in [tag for i in client.images() for tag in i["RepoTags"] or [] if tag != base]:
        if i_is_from(client, tag, "COLOUR=blue"):
            client.remove_image(tag, force=True)


def i_is_from(client: docker.APIClient, tag: str, variable: str) -> bool:
    return variable in (client.inspect_image(tag)["Config"]["Env"] or [])


def test_an_image_with_a_volume_is_refused(
    backend: DockerBackend, run: Callable, client: docker.APIClient, tmp_path: Path
) -> None:
    run(run_and_stop(backend))
    [base] = [tag for i in client.images() for tag in i["RepoTags"] or [] if re.match("composer-image:", tag)][:1]
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nVOLUME /data\n")
    with pytest.raises(SandboxStartError, match="VOLUME /data"):
        run(backend.start({}, SandboxLimits(), image=f"dockerfile:{tmp_path}/Dockerfile"))


def test_an_argument_that_cannot_be_is_refused() -> None:
    wrong: list[tuple[str, Any]] = [
        ("workdir", "relative"),
        ("workdir", "/"),
        ("workdir", "/tmp/x"),
        ("workdir", "/a b"),
        ("user", "root"),
        ("user", "a:b"),
        ("hostname", "a b"),
        ("image", ""),
        ("answer_s", 0),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            DockerBackend("x", **{name: value})
    assert os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock") == DockerBackend("x")._engine.address
