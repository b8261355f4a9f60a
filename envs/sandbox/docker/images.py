"""Images: where they come from, and what is added to one so that a sandbox can start from it.

    python:3.11             by name; pulled once if the engine does not have it
    dockerfile:<path>       built once, with the Dockerfile's folder as context
    tarball:<path>          a root file system, imported once

What is built or imported is tagged with a hash of what went into it. From any of them one more image is made, which
has the sandbox's user and, since file systems in memory will cover them, a copy of what the image holds in the places
that can be written to. These images stay: the next run finds them. They bear the label `composer.kind=image`
(`docker image prune --all --filter label=composer.kind=image` removes those that nothing uses).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import posixpath
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.utils.build import exclude_paths

from composer.errors import SandboxStartError
from envs.sandbox.docker import owner
from envs.sandbox.docker.container import UID, Settings

log = logging.getLogger(__name__)

DOCKERFILE, TARBALL = "dockerfile:", "tarball:"
SKELETON = "/usr/share/composer-skeleton"
"""Where a prepared image keeps what it held in the places that can be written to: one numbered folder for each."""
_REPOSITORY = "composer-image"
_PREPARED = "composer-sandbox"
_FORMAT = "1"
"""Of prepared images; another makes them anew."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOCK = threading.Lock()
"""Two backends of a process do not make the same image at once."""


def prepare(client: docker.APIClient, image: str, settings: Settings) -> tuple[str, list[str]]:
    """Make sure that the engine has the image that sandboxes start from. Blocks, for as long as a pull takes.

    Returns:
        Its name, and the places that have a skeleton, in the order of its folders.

    Raises:
        SandboxStartError: there is no such image, or it cannot be made.
        APIError: as the SDK raises it.
    """
    with _LOCK:
        base = _base(client, image)
        key = [_FORMAT, base["Id"], settings.workdir, settings.user, str(UID)]
        name = f"{_PREPARED}:{_digest(json.dumps(key).encode())}"
        found = _inspect(client, name)
        if found is None:
            _make(client, base, name, settings)
            found = client.inspect_image(name)
    return name, json.loads((found["Config"].get("Labels") or {}).get("composer.skeleton", "[]"))


def skeleton_command(places: list[str]) -> bytes:
    """A command that fills the places from the skeleton."""
    return b"\n".join(
        f"cp -a {SKELETON}/{number}/. '{place}/' || exit 1".encode() for number, place in enumerate(places)
    )


def is_there(client: docker.APIClient, image: str) -> bool:
    """Whether a sandbox can start from an image without a pull."""
    return image.startswith((DOCKERFILE, TARBALL)) or _inspect(client, image) is not None


def _base(client: docker.APIClient, image: str) -> dict[str, Any]:
    if image.startswith(DOCKERFILE):
        name = _build(client, Path(image.removeprefix(DOCKERFILE)))
    elif image.startswith(TARBALL):
        name = _import(client, Path(image.removeprefix(TARBALL)))
    else:
        name = image
        if _inspect(client, name) is None:
            _pull(client, name)
    return client.inspect_image(name)


def _inspect(client: docker.APIClient, name: str) -> dict[str, Any] | None:
    try:
        return client.inspect_image(name)
    except docker.errors.NotFound:
        return None
    except docker.errors.APIError as e:
        raise SandboxStartError(f"image={name!r} is no name that the Docker engine takes: {e.explanation}") from e


def _pull(client: docker.APIClient, name: str) -> None:
    log.info("pulling the image %s", name)
    try:
        _follow(client.pull(name, stream=True, decode=True), name)
    except (docker.errors.APIError, _FailedError) as e:
        said = " ".join(str(getattr(e, "explanation", "") or e).split())
        raise SandboxStartError(
            f"image={name!r} is not on the Docker engine and cannot be pulled: {said[:300]}; check its name, "
            "pull it yourself, or name dockerfile:<path> or tarball:<path>"
        ) from e


def _build(client: docker.APIClient, dockerfile: Path) -> str:
    if not dockerfile.is_file():
        raise SandboxStartError(f"image='{DOCKERFILE}{dockerfile}': there is no such file")
    context = dockerfile.resolve().parent
    name = f"{_REPOSITORY}:{_context_digest(context, dockerfile.name)}"
    if _inspect(client, name) is not None:
        return name
    log.info("building the image of %s", dockerfile)
    try:
        lines = client.build(
            path=str(context),
            dockerfile=dockerfile.name,
            tag=name,
            labels={owner.KIND: owner.IMAGE},
            rm=True,
            forcerm=True,
            decode=True,
        )
        _follow(lines, str(dockerfile))
    except (docker.errors.APIError, _FailedError) as e:
        raise SandboxStartError(f"image='{DOCKERFILE}{dockerfile}' cannot be built: {str(e)[:500]}") from e
    return name


def _import(client: docker.APIClient, tarball: Path) -> str:
    try:
        with tarball.open("rb") as file:
            name = f"{_REPOSITORY}:{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
    except OSError as e:
        raise SandboxStartError(f"image='{TARBALL}{tarball}' cannot be read: {e.strerror}") from e
    if _inspect(client, name) is not None:
        return name
    log.info("importing the image of %s", tarball)
    repository, tag = name.split(":")
    changes = [f"ENV PATH={_PATH}", f"LABEL {owner.KIND}={owner.IMAGE}"]
    try:
        answer = client.import_image_from_file(str(tarball), repository, tag, changes=changes)
        _follow((json.loads(line) for line in str(answer).splitlines() if line.strip()), str(tarball))
    except (docker.errors.APIError, _FailedError) as e:
        raise SandboxStartError(f"image='{TARBALL}{tarball}' cannot be imported: {str(e)[:500]}") from e
    return name


class _FailedError(Exception):
    """What the engine said in the middle of a pull, a build or an import."""


def _follow(lines: Iterable[dict[str, Any]], what: str) -> None:
    """Log what the engine says of its progress, a line for each new step."""
    last = ""
    for line in lines:
        if "error" in line:
            raise _FailedError(" ".join(str(line["error"]).split()))
        step = str(line.get("stream") or line.get("status") or "").strip()
        if step and step != last and "progress" not in line:
            log.info("%s: %s", what, step[:200])
            last = step


def _context_digest(context: Path, dockerfile: str) -> str:
    """A hash of the Dockerfile's folder, without what .dockerignore leaves out."""
    ignore = context / ".dockerignore"
    patterns = [line.strip() for line in ignore.read_text().splitlines()] if ignore.is_file() else []
    patterns = [line for line in patterns if line and not line.startswith("#")]
    digest = hashlib.sha256(dockerfile.encode())
    for path in sorted(exclude_paths(str(context), patterns, dockerfile=dockerfile)):
        full = context / path
        if full.is_symlink():
            kind, content = b"l", os.fsencode(full.readlink())
        elif full.is_file():
            kind, content = b"%o" % (full.stat().st_mode & 0o777), full.read_bytes()
        else:
            kind, content = b"d", b""
        for part in (os.fsencode(path), kind, content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _make(client: docker.APIClient, base: dict[str, Any], name: str, settings: Settings) -> None:
    """Add to an image, in a container of it that never runs, and keep the result."""
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
        name=f"{_PREPARED}-{uuid.uuid4().hex[:12]}",
        use_config_proxy=False,
        host_config=client.create_host_config(network_mode="none"),
    )["Id"]
    try:
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                _add_user(client, container, tar, settings)
                places = _add_skeleton(client, container, tar, settings)
            file.seek(0)
            if not client.put_archive(container, "/", file):
                raise SandboxStartError(f"the user of sandboxes cannot be added to image {base['Id']}")
        changes = [f"LABEL {owner.KIND}={owner.IMAGE}", f"LABEL composer.skeleton={json.dumps(json.dumps(places))}"]
        repository, tag = name.split(":")
        # Labels of the container would be the image's too, and its owner is soon gone.
        changes += [f"LABEL {key}=" for key in labels if key != owner.KIND]
        client.commit(container, repository, tag, changes=changes)
    finally:
        owner.remove(client, container)


def _add_user(client: docker.APIClient, container: str, tar: tarfile.TarFile, settings: Settings) -> None:
    shell = "/bin/bash" if _read(client, container, "/bin/bash") is not None else "/bin/sh"
    user = settings.user
    for path, line in (
        ("/etc/passwd", f"{user}:x:{UID}:{UID}::{settings.home}:{shell}"),
        ("/etc/group", f"{user}:x:{UID}:"),
    ):
        there = (_read(client, container, path) or b"").decode(errors="surrogateescape").splitlines()
        others = [other for other in there if other.split(":")[0] != user and other.split(":")[2:3] != [str(UID)]]
        content = "".join(f"{one}\n" for one in [*others, line]).encode(errors="surrogateescape")
        info = tarfile.TarInfo(path.strip("/"))
        info.size, info.mode = len(content), 0o644
        tar.addfile(info, io.BytesIO(content))


def _add_skeleton(client: docker.APIClient, container: str, tar: tarfile.TarFile, settings: Settings) -> list[str]:
    """Copy what the image holds in the places that will be covered, as the user's own."""
    places = []
    for place in settings.kept_places:
        # What lies in /tmp of an image was left there by its making.
        if place == "/tmp" or not _copy(client, container, place, f"{SKELETON}/{len(places)}", tar):
            continue
        places.append(place)
    return places


def _copy(client: docker.APIClient, container: str, place: str, target: str, tar: tarfile.TarFile) -> bool:
    """Add a folder of the container under another name; false if it is empty or not there."""
    with tempfile.TemporaryFile() as file:
        try:
            chunks, _ = client.get_archive(container, place)
        except docker.errors.NotFound:
            return False
        for chunk in chunks:
            file.write(chunk)
        file.seek(0)
        top, num_entries = posixpath.basename(place), 0
        with tarfile.open(fileobj=file, mode="r") as source:
            for info in source:
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
        return num_entries > 0


def _read(client: docker.APIClient, container: str, path: str) -> bytes | None:
    """A small file of a container that never ran."""
    try:
        chunks, _ = client.get_archive(container, path)
    except docker.errors.NotFound:
        return None
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        for info in tar:
            part = tar.extractfile(info) if info.isreg() else None
            return part.read() if part is not None else b""
    return b""
