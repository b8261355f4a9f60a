"""The image that sandboxes start from, made of another: with the sandbox's user, and with what a profile adds.

File systems in memory will cover the places that can be written to, so what belongs there lies in a skeleton, from
which each sandbox fills them. Everything else is in the image's own file system, and costs a start nothing.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import random
import struct
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors

from composer.errors import SandboxStartError
from envs.sandbox.docker import owner, scenery
from envs.sandbox.docker.container import UID, Settings, is_below
from envs.sandbox.realism.profile import Profile, dress, spread_dates

SKELETON = "/usr/share/base-files/skel"
"""What the image held in the places that can be written to: one numbered folder for each."""
NAME = "composer-sandbox"
_SKELETON_LABEL = "composer.skeleton"
_AGED = ("/etc", "/usr/local", "/opt")
"""Folders in which somebody who asks how old a machine is finds what was installed on it."""
_MOST_AGED_BYTES = 2**28
"""A larger one is left as it is: files that get a new date are kept twice."""
_MOST_KEPT_BYTES = 2**30
"""Of all that an image holds in the places that can be written to: it passes over this machine's disk, and lies in the
memory of every sandbox."""
_MOST_ENTRIES = 500_000
"""Files and folders of such a place, or of one that is aged."""
_MOST_READ_BYTES = 2**20
"""Of a file such as /etc/passwd, which is read into this process; of bytecode, which is stamped there."""
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ".local/bin/"
"""In the user's home: what a profile puts there is found last, behind the image's own."""
_ENGINES = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"}
"""Files that the engine puts into every container."""


def make(client: docker.APIClient, base: dict[str, Any], name: str, settings: Settings) -> None:
    """Add to an image, in a container of it that never runs, and keep the result.

    Raises:
        SandboxStartError: it cannot be added to.
        APIError: as the SDK raises it.
    """
    config = base.get("Config") or {}
    if volumes := sorted(config.get("Volumes") or {}):
        raise SandboxStartError(
            f"an image that declares VOLUME {' '.join(volumes)} cannot be used, since nothing bounds what is written "
            "there: build it without"
        )
    labels = owner.labels("prepare", "") | {owner.KIND: owner.SANDBOX}
    container = client.create_container(
        base["Id"],
        entrypoint=["/bin/sh"],
        command=["-c", ":"],
        labels=labels,
        name=f"{NAME}-{uuid.uuid4().hex[:12]}",
        use_config_proxy=False,
        host_config=client.create_host_config(network_mode="none"),
    )["Id"]
    try:
        image = _Image(client, container, settings)
        if image.shell is None:
            raise SandboxStartError("the image has no /bin/sh: take one with a shell, coreutils and tar, or busybox")
        with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                places = image.add(tar, Path(folder))
            file.seek(0)
            if not client.put_archive(container, "/", file):
                raise SandboxStartError(f"the user of sandboxes cannot be added to image {base['Id']}")
        described = json.dumps(json.dumps(places))
        changes = [f"LABEL {owner.KIND}={owner.IMAGE}", f"LABEL {_SKELETON_LABEL}={described}"]
        changes += [f"ENV SHELL={image.shell}"]
        if any(path.startswith(_PROGRAMS) for path in settings.profile.files):
            path = next((v for v in config.get("Env") or [] if v.startswith("PATH=")), f"PATH={USUAL_PATH}")
            changes += [f"ENV {path}:{settings.home}/{_PROGRAMS}".rstrip("/")]
        repository, tag = name.split(":")
        # Labels of the container would be the image's too, and its owner is soon gone.
        changes += [f"LABEL {key}=" for key in labels if key != owner.KIND]
        client.commit(container, repository, tag, changes=changes)
    finally:
        owner.remove(client, container)


def places_of(image: dict[str, Any]) -> list[str]:
    """The places that have a skeleton, in the order of its folders; `image` as the engine describes it."""
    return json.loads((image["Config"].get("Labels") or {}).get(_SKELETON_LABEL, "[]"))


def skeleton_command(places: Sequence[str]) -> bytes:
    """A command that fills the places from the skeleton."""
    return b"\n".join(
        f"cp -a {SKELETON}/{number}/. '{place}/' || exit 1".encode() for number, place in enumerate(places)
    )


class _Image:
    """An image, as it lies in a container of it that never ran."""

    def __init__(self, client: docker.APIClient, container: str, settings: Settings) -> None:
        self._client, self._container, self._settings = client, container, settings
        self._kept_bytes = _MOST_KEPT_BYTES
        self.shell = next((path for path in ("/bin/bash", "/bin/sh") if self._has(path)), None)

    def add(self, tar: tarfile.TarFile, skel: Path) -> list[str]:
        """Write everything that is added; returns the places that have a skeleton."""
        profile = self._settings.profile
        self._dress(skel)
        if profile.age_days:
            self._add_aged(tar)
        self._add_first_process(tar)
        home = self._settings.home
        _add_tree(tar, skel, "", 0, leave_out=home)
        places = []
        for place in self._settings.kept_places:
            target = f"{SKELETON}/{len(places)}"
            # What lies in /tmp of an image was left there by its making.
            found = place != "/tmp" and self._copy(place, target, tar)
            if is_below(home, place) and not is_below(home, self._settings.workdir):
                ours = skel / home.strip("/")
                if any(ours.iterdir()):
                    _add_tree(tar, ours, posixpath.normpath(f"{target}/{posixpath.relpath(home, place)}"), UID)
                    found = True
            if found:
                places.append(place)
        return places

    def _dress(self, skel: Path) -> None:
        settings = self._settings
        etc, user, home = skel / "etc", settings.user, settings.home
        etc.mkdir()
        (skel / home.strip("/")).mkdir(parents=True)
        for name, line in (
            ("passwd", f"{user}:x:{UID}:{UID}::{home}:{self.shell}"),
            ("group", f"{user}:x:{UID}:"),
        ):
            there = (self._read(f"/etc/{name}") or b"").decode(errors="surrogateescape").splitlines()
            others = [other for other in there if other.split(":")[0] != user and other.split(":")[2:3] != [str(UID)]]
            content = "".join(f"{one}\n" for one in [*others, line]).encode(errors="surrogateescape")
            (etc / name).write_bytes(content)
        profile = settings.profile
        known = {line.split(":")[0] for line in (etc / "passwd").read_text(errors="surrogateescape").splitlines()}
        release = str(self._client.info().get("KernelVersion") or "")
        in_image = replace(
            profile,
            users=tuple(name for name in profile.users if name not in known),
            folders=tuple(folder for folder in profile.folders if scenery.lies_in_image(folder)),
            files={path: text for path, text in profile.files.items() if scenery.lies_in_image(path)},
            num_cached=0,  # they would lie in each sandbox's memory
            package_list=False,  # the image has its own, or none
        )
        dress(skel, home, in_image, release)
        if profile.age_days and not self._has("/etc/localtime"):
            (etc / "localtime").write_bytes(_utc())
        spread_dates(skel, profile)

    def _add_first_process(self, tar: tarfile.TarFile) -> None:
        profile = self._settings.profile
        script = scenery.first_script(profile)
        then = int(time.time() - 86400 * profile.age_days)
        program = tarfile.TarInfo(scenery.first_program(profile).strip("/"))
        program.size, program.mode, program.mtime = len(script), 0o755, then
        tar.addfile(program, io.BytesIO(script))
        pipe = tarfile.TarInfo(scenery.PIPE.strip("/"))
        pipe.type, pipe.mode, pipe.mtime = tarfile.FIFOTYPE, 0o600, then
        tar.addfile(pipe)

    def _add_aged(self, tar: tarfile.TarFile) -> None:
        """Give files of the image dates of the past: they are all of the day on which it was made."""
        profile, now = self._settings.profile, time.time()
        for place in _AGED:
            with tempfile.TemporaryFile() as file:
                if not self._get(place, file, _MOST_AGED_BYTES):
                    continue
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:") as source:
                    for info in _entries(source):
                        path = posixpath.join(posixpath.dirname(place), info.name)
                        if not info.isreg() or path in _ENGINES:
                            continue
                        part = source.extractfile(info)
                        info.name, info.pax_headers = path.strip("/"), {}
                        info.mtime = _date(path, profile, now)
                        if path.endswith(".pyc") and part is not None and info.size <= _MOST_READ_BYTES:
                            part = io.BytesIO(_stamped(part.read(), _date(_source_of(path), profile, now)))
                        tar.addfile(info, part)
                        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - each would be remembered

    def _copy(self, place: str, target: str, tar: tarfile.TarFile) -> bool:
        """Add a folder of the image under another name, as the user's own; false if it is empty or not there."""
        with tempfile.TemporaryFile() as file:
            there = self._get(place, file, self._kept_bytes)
            if there is None:
                raise SandboxStartError(
                    f"the image holds more than {_MOST_KEPT_BYTES} bytes in the places that sandboxes write to, the "
                    f"last of which is {place}: make it smaller, or move what need not change there elsewhere"
                )
            if not there:
                return False
            self._kept_bytes -= file.tell()
            file.seek(0)
            top, num_entries = posixpath.basename(place), 0
            with tarfile.open(fileobj=file, mode="r:") as source:
                for info in _entries(source):
                    rest = info.name.partition("/")[2] if info.name.partition("/")[0] == top else None
                    if rest is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                        continue
                    if info.islnk():
                        info.linkname = f"{target}/{info.linkname.partition('/')[2]}".strip("/")
                    num_entries += bool(rest)
                    info.name = f"{target}/{rest}".strip("/")
                    info.uid = info.gid = UID
                    info.uname = info.gname = ""
                    info.mode &= 0o777
                    info.pax_headers = {}
                    tar.addfile(info, source.extractfile(info) if info.isreg() else None)
                    tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - each would be remembered
            return num_entries > 0

    def _has(self, path: str) -> bool:
        """Whether there is something: nothing of it is read."""
        try:
            chunks, _ = self._client.get_archive(self._container, path)
        except docker.errors.NotFound:
            return False
        _hang_up(chunks)
        return True

    def _get(self, path: str, file: IO[bytes], most: int) -> bool | None:
        """Write an archive of a path to a file; false if it is not there, None if it has more bytes than `most`."""
        try:
            chunks, _ = self._client.get_archive(self._container, path)
        except docker.errors.NotFound:
            return False
        for chunk in chunks:
            if file.tell() + len(chunk) > most:
                _hang_up(chunks)
                return None
            file.write(chunk)
        return True

    def _read(self, path: str) -> bytes | None:
        """A small file; b"" if it is a link or a folder, None if it is not there.

        Raises:
            SandboxStartError: it is not small.
        """
        buffer = io.BytesIO()
        there = self._get(path, buffer, _MOST_READ_BYTES)
        if there is None:
            raise SandboxStartError(f"{path} of the image has more than {_MOST_READ_BYTES} bytes: take another image")
        if not there:
            return None
        buffer.seek(0)
        with tarfile.open(fileobj=buffer, mode="r:") as tar:
            for info in tar:
                part = tar.extractfile(info) if info.isreg() else None
                return part.read() if part is not None else b""
        return b""


def _hang_up(chunks: Any) -> None:
    """Let go of an answer of the engine's that is not read to its end."""
    chunks.close()


def _entries(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """What an archive holds, without remembering all of it.

    Raises:
        SandboxStartError: there are too many.
    """
    number = 0
    while (info := archive.next()) is not None:
        if (number := number + 1) > _MOST_ENTRIES:
            raise SandboxStartError(f"the image holds more than {_MOST_ENTRIES} files in one folder: make it smaller")
        yield info
        archive.members = []  # pyright: ignore[reportAttributeAccessIssue] - which it would remember for ever


def _add_tree(tar: tarfile.TarFile, top: Path, target: str, uid: int, leave_out: str = "") -> None:
    """Add what lies below a folder, with its modes and dates. Folders are left as they are where the image has them."""
    for folder, _, names in os.walk(top):
        inside = Path(folder).relative_to(top)
        if leave_out and is_below(f"/{inside}", leave_out):
            continue
        is_new = uid or not any(Path(folder).iterdir())
        for path in [Path(folder)] * bool(is_new) + [Path(folder) / name for name in names]:
            info = tar.gettarinfo(path, posixpath.normpath(f"{target}/{path.relative_to(top)}").strip("/"))
            info.uid = info.gid = uid
            info.uname = info.gname = ""
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def _date(path: str, profile: Profile, now: float) -> int:
    """A date of a path's own, which depends on nothing but the profile and the day."""
    return int(now - 86400 * random.Random(f"{profile.name} {path}").uniform(0.5, profile.age_days))


def _source_of(compiled: str) -> str:
    """/a/b.py of /a/__pycache__/b.cpython-311.pyc."""
    folder, name = posixpath.split(compiled)
    return f"{posixpath.dirname(folder)}/{name.split('.')[0]}.py"


def _stamped(compiled: bytes, date: int) -> bytes:
    """Bytecode with its source's new date (PEP 552: bytes 8 to 11, if bytes 4 to 7 are 0)."""
    if compiled[4:8] != bytes(4):
        return compiled
    return compiled[:8] + date.to_bytes(4, "little") + compiled[12:]


def _utc() -> bytes:
    """A time zone without a difference: RFC 9636, versions 1 and 2 with one type, and the rule for ever."""
    block = b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lbb", 0, 0, 0) + b"UTC\0"
    return block + block + b"\nUTC0\n"


def describe(profile: Profile, settings: Settings) -> list[str]:
    """What, beside the image, decides how a prepared one looks."""
    return [settings.workdir, *settings.writable, str(UID), json.dumps(vars(profile), default=vars, sort_keys=True)]
