"""Images: where they come from, and what is added to one so that a sandbox can start from it.

    python:3.11             by name; pulled once if the engine does not have it
    dockerfile:<path>       built once, with the Dockerfile's folder as context, without a network unless it is allowed
    tarball:<path>          a root file system, imported once

A build runs what its Dockerfile says as root of an ordinary container of the engine, not in a sandbox: its memory, its
share of the CPUs, its context and its time are bounded, and what it writes to the engine's disk is not.

What is built or imported is tagged with a hash of what went into it. From any of them one more image is made, from
which sandboxes start (prepared.py). These images stay: the next run finds them. They bear the label
`composer.kind=image` (`docker image prune --all --filter label=composer.kind=image` removes those that nothing uses).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.utils.build import exclude_paths

from composer.errors import SandboxStartError
from envs.sandbox.docker import owner, prepared
from envs.sandbox.docker.container import Settings

log = logging.getLogger(__name__)

DOCKERFILE, TARBALL = "dockerfile:", "tarball:"
_REPOSITORY = "composer-image"
_BUILD_LIMITS: Any = {"memory": 4 * 2**30, "memswap": 4 * 2**30, "cpushares": 256}
"""Of each container that a build runs: bytes, without swap on top, and a quarter of the usual share of busy CPUs."""
_BUILD_S = 1800.0
"""After which the engine is hung up on, which ends the build. One that says nothing is hung up on sooner."""
_MOST_CONTEXT_BYTES, _MOST_CONTEXT_FILES, _MOST_IGNORE_BYTES = 2**30, 100_000, 2**20
_FORMAT = "3"
"""Of prepared images; another makes them anew."""
_LOCK = threading.Lock()
"""Two backends of a process do not make the same image at once."""


@dataclass(frozen=True)
class PreparedImage:
    """An image that sandboxes start from."""

    name: str
    """On the engine."""
    skeleton: tuple[str, ...]
    """The places that have one, in the order of its folders."""
    made_from: str
    """The image that it was made from, by a name that means the same in any process: the one that a task gave, or of
    what was built or imported the hash of what went into it."""


def prepare(client: docker.APIClient, image: str, settings: Settings, build_network: bool = False) -> PreparedImage:
    """Make sure that the engine has the image that sandboxes start from. Blocks, for as long as a pull takes.

    Args:
        client: of the engine.
        image: as a task or a config names it.
        settings: of the backend.
        build_network: whether a build has the engine's network.

    Raises:
        SandboxStartError: there is no such image, or it cannot be made.
        APIError: as the SDK raises it.
    """
    with _LOCK:
        made_from = _base(client, image, build_network)
        base = client.inspect_image(made_from)
        key = [_FORMAT, base["Id"], *prepared.describe(settings.profile, settings)]
        name = f"{prepared.NAME}:{_digest(json.dumps(key).encode())}"
        found = _inspect(client, name)
        if found is None:
            prepared.make(client, base, name, settings)
            found = client.inspect_image(name)
    return PreparedImage(name, tuple(prepared.places_of(found)), made_from)


def is_there(client: docker.APIClient, image: str) -> bool:
    """Whether a sandbox can start from an image without a pull."""
    return image.startswith((DOCKERFILE, TARBALL)) or _inspect(client, image) is not None


def is_ours(image: str) -> bool:
    """Whether an image bears the name of one that was built or imported here."""
    return image.startswith(f"{_REPOSITORY}:")


def _base(client: docker.APIClient, image: str, build_network: bool) -> str:
    if image.startswith(DOCKERFILE):
        return _build(client, Path(image.removeprefix(DOCKERFILE)), build_network)
    if image.startswith(TARBALL):
        return _import(client, Path(image.removeprefix(TARBALL)))
    if _inspect(client, image) is None:
        if is_ours(image):  # no registry has it
            raise SandboxStartError(f"image={image!r}, which was built or imported, is not on the engine any more")
        _pull(client, image)
    return image


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


def _build(client: docker.APIClient, dockerfile: Path, network: bool) -> str:
    if not dockerfile.is_file():
        raise SandboxStartError(f"image='{DOCKERFILE}{dockerfile}': there is no such file")
    context = dockerfile.resolve().parent
    try:
        name = f"{_REPOSITORY}:{_context_digest(context, dockerfile.name)}"
    except (OSError, ValueError) as e:
        raise SandboxStartError(f"image='{DOCKERFILE}{dockerfile}' cannot be built: its folder: {e}") from e
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
            network_mode="default" if network else "none",
            container_limits=_BUILD_LIMITS,
        )
        with contextlib.closing(lines):
            _follow(lines, str(dockerfile), _BUILD_S)
    except (docker.errors.APIError, _FailedError) as e:
        hint = "" if network else "; a build has no network (env.sandbox.args.build_network=true gives it one)"
        raise SandboxStartError(f"image='{DOCKERFILE}{dockerfile}' cannot be built: {str(e)[:500]}{hint}") from e
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
    changes = [f"ENV PATH={prepared.USUAL_PATH}", f"LABEL {owner.KIND}={owner.IMAGE}"]
    try:
        answer = client.import_image_from_file(str(tarball), repository, tag, changes=changes)
        _follow((json.loads(line) for line in str(answer).splitlines() if line.strip()), str(tarball))
    except (docker.errors.APIError, _FailedError) as e:
        raise SandboxStartError(f"image='{TARBALL}{tarball}' cannot be imported: {str(e)[:500]}") from e
    return name


class _FailedError(Exception):
    """What the engine said in the middle of a pull, a build or an import."""


def _follow(lines: Iterable[dict[str, Any]], what: str, most_s: float = math.inf) -> None:
    """Log what the engine says of its progress, a line for each new step.

    Raises:
        _FailedError: it says that it failed, or is not done after `most_s` seconds.
    """
    last, began = "", time.monotonic()
    for line in lines:
        if time.monotonic() - began > most_s:
            raise _FailedError(f"it takes more than {most_s:g} s")
        if "error" in line:
            raise _FailedError(" ".join(str(line["error"]).split()))
        step = str(line.get("stream") or line.get("status") or "").strip()
        if step and step != last and "progress" not in line:
            log.info("%s: %s", what, step[:200])
            last = step


def _context_digest(context: Path, dockerfile: str) -> str:
    """A hash of the Dockerfile's folder, without what .dockerignore leaves out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large to be sent to the engine, or its .dockerignore is no file.
    """
    ignore = context / ".dockerignore"
    if ignore.exists() and not (ignore.is_file() and ignore.stat().st_size <= _MOST_IGNORE_BYTES):
        raise ValueError(f".dockerignore is no file of at most {_MOST_IGNORE_BYTES} bytes")
    patterns = [line.strip() for line in ignore.read_text(errors="replace").splitlines()] if ignore.exists() else []
    patterns = [line for line in patterns if line and not line.startswith("#")]
    digest, left = hashlib.sha256(dockerfile.encode()), _MOST_CONTEXT_BYTES
    paths = sorted(exclude_paths(str(context), patterns, dockerfile=dockerfile))
    if len(paths) > _MOST_CONTEXT_FILES:
        raise ValueError(f"it has more than {_MOST_CONTEXT_FILES} entries: name those to leave out in .dockerignore")
    for path in paths:
        full = context / path
        if full.is_symlink():
            kind, content = b"l", os.fsencode(full.readlink())
        elif full.is_file():
            found = full.stat()
            if (left := left - found.st_size) < 0:
                raise ValueError(
                    f"it has more than {_MOST_CONTEXT_BYTES} bytes: name files to leave out in .dockerignore"
                )
            with full.open("rb") as file:
                kind, content = b"%o" % (found.st_mode & 0o777), hashlib.file_digest(file, "sha256").digest()
        else:
            kind, content = b"d", b""
        for part in (os.fsencode(path), kind, content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
