"""The Docker backend: sandboxes are containers of a Docker engine, local or remote, from any Linux image.

What an image needs: /bin/sh, coreutils and tar, or busybox; bash is taken where there is one. What a sandbox is: one
user that is not root, no capability and no way to one, a seccomp profile of its own, no network, a read-only root,
the limits of container.py, and the looks of a profile (prepared.py, scenery.py). Nothing depends on the engine being on
this machine: nothing is mounted from it, and no process is known by its number here.

What it does not protect against: holes in the engine's kernel, which all its containers share (an engine with another
runtime, gVisor or Kata, has fewer); time spent; and being told apart from a real machine by a program that looks
closely: `composer audit` says by what.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import posixpath
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import docker

from composer.contract import Finding, SandboxLimits, Snapshot
from composer.errors import SandboxError, SandboxStartError, SnapshotGoneError
from composer.types import Pressure
from envs.sandbox import state
from envs.sandbox.docker import checks, images, owner, prepared, scenery
from envs.sandbox.docker.container import Settings, is_below
from envs.sandbox.docker.engine import Engine, EngineRefusal
from envs.sandbox.docker.once import Once
from envs.sandbox.docker.pressure import LIMITS as PROBE_LIMITS
from envs.sandbox.docker.pressure import Gauge, in_words
from envs.sandbox.docker.sandbox import DockerSandbox
from envs.sandbox.docker.snapshots import SnapshotStore
from envs.sandbox.limits_check import check_limits
from envs.sandbox.realism import audit as realism
from envs.sandbox.realism.load import load_profile

if TYPE_CHECKING:
    from envs.egress.client import Proxy
    from envs.sandbox.docker.network import Online

log = logging.getLogger(__name__)

_IMAGE_S = 3600.0
"""For an image to be pulled, built or imported."""
_MOST_WRITABLE = 4
_SYSTEM = ("/proc", "/sys", "/dev", "/tmp", "/etc", "/usr/share")


class DockerBackend:
    """Starts containers as sandboxes.

    Example:
        >>> async def example() -> bytes:
        ...     backend = DockerBackend("example", image="python:3.11")
        ...     sandbox = await backend.start({"hello.txt": b"hello"}, SandboxLimits())
        ...     result = await sandbox.shell("cat hello.txt")
        ...     await backend.close()
        ...     return result.output
    """

    files_in_memory = True
    """One tmpfs a place (container.py), which count as the container's memory."""

    def __init__(
        self,
        run_label: str,
        image: str = "python:3.11",
        workdir: str = "/home/dev/project",
        user: str | None = None,
        hostname: str | None = None,
        host: str | None = None,
        answer_s: float = 30.0,
        profile: str = "developer",
        writable: Sequence[str] = (),
        egress: dict[str, Any] | None = None,
        build_network: bool = False,
        run_dir: str = "",
    ) -> None:
        """Nothing is sent to the engine before the first sandbox starts.

        Args:
            run_label: of the run; part of the names and labels of containers.
            image: what sandboxes start from where a task names nothing: an image's name, `dockerfile:<path>` or
                `tarball:<path>` (a root file system); see images.py.
            workdir: absolute path in the sandbox in which commands start.
            user: name of the sandbox's user; None: the profile's.
            hostname: of the sandbox; None: the profile's.
            host: the engine's address, unix://, tcp:// or ssh://; None: `DOCKER_HOST`, or the default socket.
            answer_s: seconds in which the engine has to answer.
            profile: what sandboxes look like (realism/profiles): `developer`, `plain`, or a YAML file of your own.
            writable: further folders that can be written to, beside the home, the working directory and /tmp: absolute
                paths, four at most, each with a sixteenth of `disk_bytes`. Harbor's tasks need /tests, /logs and
                /solution.
            egress: what they may ask of the network (`envs.egress.policy.Policy`); None: they have none.
            build_network: whether the build of a `dockerfile:` has the engine's network, which no sandbox has. Without
                it, a Dockerfile can only use its folder and images that the engine has or can pull.
            run_dir: of the run, in which `egress/` is for the log of what they asked; "": there is none.

        Raises:
            ValueError: an argument cannot be what it names.
            ConfigError: `egress` holds something that it cannot.
        """
        _check_folder("workdir", workdir)
        looks = load_profile(profile, user=user, hostname=hostname)
        for name, value in (("user", looks.user), ("hostname", looks.hostname)):
            if not value.isascii() or not value.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"{name}={value!r}: must be letters, digits, '-' and '_'")
        if looks.user == "root":
            raise ValueError("user='root': the sandbox's user must be another")
        if not image:
            raise ValueError("image='': name an image, dockerfile:<path> or tarball:<path>")
        if not answer_s > 0:
            raise ValueError(f"answer_s={answer_s}: must be above 0")
        self.run_label, self.image = run_label, image
        self.profile = profile
        self._settings = Settings(
            posixpath.normpath(workdir), looks, _writable(writable, workdir, f"/home/{looks.user}")
        )
        self._engine = Engine(host, answer_s)
        self._build_network = build_network
        self._egress = egress, run_dir
        self.proxy: Proxy | None = None
        """Through which sandboxes reach the network, if they do."""
        if egress is not None:
            from envs.egress.client import make_proxy  # without a network, nothing of it is loaded

            self.proxy = make_proxy(egress, run_label, run_dir, self._on_outage)
        self._trusted: Once[str, tuple[str, bytes]] = Once()
        """By prepared image: the relay's image, and the certificates."""
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._starting: set[asyncio.Task[DockerSandbox]] = set()
        self._snapshots = SnapshotStore()
        self._prepared: Once[str, images.PreparedImage] = Once()
        self._kept: Once[SandboxLimits, None] = Once()
        """Limits that the engine was seen to keep, for a profile that hides them."""
        self._is_checked = False
        self._pressure_seen = ""
        """By `check`."""
        self._gauge = Gauge(self._describe, self._start_probe)

    async def start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, *, image: str = "", base: Snapshot | None = None
    ) -> DockerSandbox:
        """A fresh sandbox, with `files` in its `workdir`.

        Args:
            files: path relative to `workdir` -> content; written over what is there.
            limits: of this sandbox.
            image: what it starts from; "": the backend's own.
            base: the state that it starts from, of a sandbox of this backend; its image is then the snapshot's.

        Raises:
            SandboxStartError: it could not start, a limit could not be applied, or there is no such image or snapshot.
        """
        check_limits(limits)
        # A container that is being made when the caller is cancelled has to be removed when it is there.
        task = asyncio.ensure_future(self._start(files, limits, image, base))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        except SandboxStartError:
            raise
        except SandboxError as e:
            raise SandboxStartError(f"a sandbox could not start: {e}") from e
        except OSError as e:
            raise SandboxStartError(f"a sandbox could not start: {e}") from e

    async def _start(
        self, files: Mapping[str, bytes], limits: SandboxLimits, image: str, base: Snapshot | None
    ) -> DockerSandbox:
        image = (base.image if base is not None else image) or self.image
        try:
            return await self._start_from(image, files, limits, base)
        except EngineRefusal as e:
            if e.status != 404:
                raise
            # Somebody has removed the image, or the container before it ran, as `docker system prune` does.
            log.info("starting once more: %s", e)
            self._prepared.forget(image)
        return await self._start_from(image, files, limits, base)

    async def _start_from(
        self, image: str, files: Mapping[str, bytes], limits: SandboxLimits, base: Snapshot | None
    ) -> DockerSandbox:
        of = await self._prepare(image)
        online = None
        if self.proxy is not None and self.proxy.serves(limits):
            online = await self._go_online(self.proxy, of.name)
        if self._settings.hides_groups:
            await self._kept.get(limits, lambda: self._start_twin(image, of, limits))
        sandbox = self._new(image, of, self._settings, limits)
        await self._begin(sandbox, of.name, of.skeleton, base, files, online)
        return sandbox

    async def _go_online(self, proxy: Proxy, image: str) -> tuple[str, bytes, Proxy]:
        """The relay's image and the certificates, for a prepared image."""
        before = proxy.root
        await proxy.ready()
        if proxy.root != before:  # another proxy than the last
            self._trusted.clear()
        root = proxy.root
        assert root is not None

        async def make() -> tuple[str, bytes]:
            from envs.sandbox.docker import network, relay_image

            version, info = await self._engine.call("describe itself", lambda client: (client.version(), client.info()))
            what, remedy = relay_image.why_not(version, info)
            if what:
                raise SandboxStartError(f"containers cannot reach the egress proxy: {what}; {remedy}")
            relay = await self._engine.call("import an image", relay_image.provide, _IMAGE_S, for_images=True)
            folder = await self._engine.call(
                "show an image's certificates", lambda client: network.certificates(client, image, root)
            )
            return relay, folder

        return *await self._trusted.get(image, make), proxy

    async def _start_twin(self, image: str, of: images.PreparedImage, limits: SandboxLimits) -> None:
        """See in a container that hides nothing whether the engine keeps these limits."""
        twin = self._new(image, of, replace(self._settings, is_twin=True), limits)
        await self._begin(twin, of.name, (), None, {})
        await twin.stop()

    async def _start_probe(self) -> DockerSandbox:
        """A container in which nothing runs, for `pressure`."""
        of = await self._prepare(self.image)
        probe = self._new(self.image, of, replace(self._settings, is_twin=True), PROBE_LIMITS)
        await self._begin(probe, of.name, (), None, {})
        return probe

    def _new(self, image: str, of: images.PreparedImage, settings: Settings, limits: SandboxLimits) -> DockerSandbox:
        number = f"{next(self._numbers):05d}"
        label = re.sub(r"[^A-Za-z0-9_-]", "-", self.run_label)[:40] or "run"
        sandbox = DockerSandbox(
            f"{self.run_label}/{number}",
            f"composer-{label}-{self._id[:8]}-{number}",
            lambda file: self._snapshots.add(file, image, of.made_from),
            settings,
            limits,
            self._engine,
            self._snapshots,
            self._fork,
            self._forget,
            self.proxy.heed if self.proxy is not None else lambda: None,
        )
        self._sandboxes[sandbox.name] = sandbox
        return sandbox

    async def _begin(
        self,
        sandbox: DockerSandbox,
        name: str,
        skeleton: Sequence[str],
        base: Snapshot | None,
        files: Mapping[str, bytes],
        online: tuple[str, bytes, Proxy] | None = None,
    ) -> None:
        labels = owner.labels(self.run_label, self._id)
        given = self._online(sandbox, *online) if online is not None else None
        try:
            archive = self._open(base) if base is not None else None
            await sandbox.begin(name, prepared.skeleton_command(skeleton), labels, archive, files, given)
        except BaseException:
            await sandbox.stop()
            raise

    def _open(self, base: Snapshot) -> tuple[BinaryIO, int]:
        try:
            return self._snapshots.open(base)
        except SandboxError as e:
            raise SnapshotGoneError(str(e)) from e

    def _online(self, sandbox: DockerSandbox, relay: str, certificates: bytes, proxy: Proxy) -> Online:
        from envs.egress import trust
        from envs.sandbox.docker.network import Network, Online

        number = sandbox.id.rpartition("/")[2]
        network = Network(self._engine, proxy, number, sandbox.name, sandbox.lose)
        return Online(network, relay, certificates, trust.variables())

    def _on_outage(self, number: str | None, reason: str) -> None:
        """What runs now may see a broken network, and take it for an answer: it cannot go on."""
        for sandbox in list(self._sandboxes.values()):
            if sandbox.is_online and number in (None, sandbox.id.rpartition("/")[2]):
                sandbox.lose(reason)

    def _forget(self, name: str) -> None:
        self._sandboxes.pop(name, None)

    async def _fork(self, snapshot: Snapshot, limits: SandboxLimits) -> DockerSandbox:
        return await self.start({}, limits, base=snapshot)

    async def _prepare(self, image: str) -> images.PreparedImage:
        if not self._is_checked:
            version = await self._engine.call("say its version", lambda client: client.version())
            checks.refuse(version, (await self._describe())[1])
            self._is_checked = True
        return await self._prepared.get(image, lambda: self._prepare_now(image))

    async def _describe(self) -> tuple[str, dict[str, Any]]:
        return self._engine.address, await self._engine.call("describe itself", lambda client: client.info())

    async def pressure(self) -> Pressure | None:
        """How hard the engine's machine is pressed; None: as this one is, on which it runs. Raises nothing."""
        return await self._gauge.read()

    async def _prepare_now(self, image: str) -> images.PreparedImage:
        def prepare(client: docker.APIClient) -> images.PreparedImage:
            return images.prepare(client, image, self._settings, self._build_network)

        return await self._engine.call(f"prepare the image {image!r}", prepare, _IMAGE_S, for_images=True)

    async def audit(self) -> list[Finding]:
        """What gives a sandbox away to a program in it that looks closely; see `composer.contract.SandboxBackend`.

        Raises:
            SandboxStartError: it could not start.
            SandboxError: it failed under the probe.
        """
        sandbox = await self.start({}, SandboxLimits())
        try:
            return await realism.audit(sandbox, scenery.REMEDIES)
        finally:
            await sandbox.stop()

    async def save(self, snapshot: Snapshot, path: Path) -> None:
        """Write a snapshot to a file, which this backend can `load` also in another process: whole or not at all.

        Raises:
            OSError: the file cannot be written.
            SandboxError: there is no such snapshot any more.
        """
        await asyncio.to_thread(self._snapshots.save, snapshot, path)

    async def load(self, path: Path) -> Snapshot:
        """A snapshot from a file that `save` wrote. Its content is untrusted: it reaches nothing but sandboxes.

        Raises:
            OSError: the file cannot be read, or there is no room.
            SandboxError: it is no snapshot of such a backend.
        """

        def is_there(image: str) -> bool:
            return self._engine.call_now("look for an image", lambda client: images.is_there(client, image))

        known = {self.image, *self._prepared.keys()}
        return await asyncio.to_thread(self._snapshots.load, path, self._settings.kept_places, known, is_there)

    async def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Sandboxes that started from it go on. Idempotent; raises nothing."""
        self._snapshots.drop(snapshot)

    async def close(self) -> None:
        """Stop every sandbox this backend started. Idempotent; raises nothing."""
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes.values())))
        self._sandboxes.clear()
        if self.proxy is not None:
            self.proxy.close()
        self._trusted.clear()
        self._gauge.forget()
        self._snapshots.clear()
        self._engine.close()
        self._prepared.clear()
        self._kept.clear()
        self._is_checked = False

    def check(self) -> list[Finding]:
        """What this machine has and lacks for this backend. Starts and stops one real sandbox; raises nothing."""

        def is_there() -> bool:
            return self._engine.call_now("look for an image", lambda client: images.is_there(client, self.image))

        from envs.egress.client import finding

        try:
            findings = [*checks.check(self._engine, is_there, self._trial), *self._check_network(finding)]
        except SandboxError as e:
            return [Finding("Docker engine", False, str(e), "look at the image's name, and at the engine's own log")]
        if self._pressure_seen:
            findings.append(Finding("pressure", True, self._pressure_seen, required=False))
        return findings

    def _check_network(self, finding: Callable[[bool], Finding]) -> list[Finding]:
        """What keeps containers from the proxy, where they are to reach it."""
        if self.proxy is None:
            return []
        from envs.sandbox.docker import relay_image

        try:
            version, info = self._engine.call_now("describe itself", lambda client: (client.version(), client.info()))
        except SandboxError:
            return [finding(True)]  # of which more has been said already
        what, remedy = relay_image.why_not(version, info)
        detail = what or "a relay beside each container can lead to the egress proxy"
        return [finding(True), Finding("network relay", not what, detail, remedy)]

    async def _trial(self) -> None:
        """Start a sandbox of a backend like this one, its network included, and run a command in it."""
        settings, (egress, run_dir) = self._settings, self._egress
        trial = DockerBackend(
            f"{self.run_label}-check",
            self.image,
            workdir=settings.workdir,
            user=settings.user,
            hostname=settings.profile.hostname,
            host=self._engine.address,
            answer_s=self._engine.answer_s,
            profile=self.profile,
            writable=settings.writable,
            egress=egress,
            build_network=self._build_network,
            run_dir=run_dir,
        )
        try:
            sandbox = await trial.start({}, SandboxLimits())
            result = await sandbox.shell("true")
            if result.exit_code != 0:
                raise SandboxError(f"'true' ended with {result.exit_code} in a sandbox: {result.output!r}")
            self._pressure_seen = in_words(await trial.pressure())
        finally:
            await trial.close()

    def sweep(self) -> int:
        """Remove the containers of runs that were killed on this machine; never touches a live run's, or another's.

        What lives elsewhere, or cannot be told, ends with its own lifetime.

        Returns:
            How many containers were removed.
        """
        try:
            state.sweep()  # the sockets of tunnels, and of proxies
            return self._engine.call_now("list containers", owner.remove_dead)
        except SandboxError as e:
            log.debug("nothing could be swept: %s", e)
            return 0


def _check_folder(name: str, path: str) -> None:
    if not re.fullmatch(r"/[A-Za-z0-9._/-]*", path) or ".." in Path(path).parts or Path(path) == Path("/"):
        raise ValueError(f"{name}={path!r}: must be an absolute path without '..' and blanks, other than '/'")
    if any(is_below(path, folder) for folder in _SYSTEM):
        raise ValueError(f"{name}={path!r}: must lie outside {', '.join(_SYSTEM)}")


def _writable(paths: Sequence[str], workdir: str, home: str) -> tuple[str, ...]:
    """Further folders that can be written to; none of these places may lie in another one."""
    if isinstance(paths, str) or len(paths) > _MOST_WRITABLE:
        raise ValueError(f"writable={paths!r}: must be a list of at most {_MOST_WRITABLE} folders")
    found: list[str] = []
    for path in paths:
        _check_folder("writable", path)
        if any(is_below(path, other) or is_below(other, path) for other in (workdir, home, *found)):
            raise ValueError(f"writable={path!r}: can be written to already, or holds what can: leave it out")
        found.append(posixpath.normpath(path))
    return tuple(found)
