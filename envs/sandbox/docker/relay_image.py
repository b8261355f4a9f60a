"""The image of the relay by which a container reaches the egress proxy: the Python that runs here, and nothing else.

What a sandbox's own image holds is of others, and need not have a Python. So the relay (envs/egress/relay.py) brings
its own: this process's, with the modules and libraries that it was seen to load, a dozen megabytes. The engine gets it
once, under a name with a hash of its content. It fits an engine of this machine's architecture.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import platform
import py_compile
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import docker
import docker.errors

from composer.errors import SandboxStartError
from envs.sandbox.docker import owner

REPOSITORY = "composer-relay"
PROGRAM = ["/python/bin/python3", "-I", "-S", "/product/envs/egress/relay.py"]
_PRODUCT = (
    "envs/__init__.py",
    "envs/egress/__init__.py",
    *(f"envs/egress/{n}.py" for n in ("carrier", "gate", "relay")),
)
_TOP = Path(__file__).parents[3]
_PROBE = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from envs.egress import relay
asyncio.run(asyncio.sleep(0))
"x".encode("idna"), "x".encode("latin-1"), "x".encode("ascii")
modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())} - {None}
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if len(line.split(maxsplit=5)) == 6}
print(json.dumps([os.path.dirname(os.__file__), sorted(modules), sorted(path for path in mapped if path[0] == "/")]))
"""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PT_INTERP = 3


def why_not(version: dict, info: dict) -> tuple[str, str]:
    """Why an engine cannot have the relay, and the remedy; nothing if it can."""
    ours = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if version.get("Arch") not in (ours, None):
        what = (
            f"the engine runs programs for {version.get('Arch')}, and the relay's Python is this machine's, for {ours}"
        )
        return what, "run the env workers on a machine of the engine's architecture"
    if any(str(option).startswith("name=userns") for option in info.get("SecurityOptions") or []):
        what = "the engine gives each container a user namespace of its own (userns-remap), which no other may change"
        return what, "start dockerd without --userns-remap, or rootless as a whole"
    return "", ""


def provide(client: docker.APIClient) -> str:
    """Make sure that the engine has the image; returns its name. Blocks.

    Raises:
        SandboxStartError: it cannot be made of this Python.
        APIError: as the SDK raises it.
    """
    content = archive()
    tag = hashlib.sha256(content).hexdigest()[:32]
    name = f"{REPOSITORY}:{tag}"
    try:
        client.inspect_image(name)
    except docker.errors.NotFound:
        changes = [f"LABEL {owner.KIND}={owner.IMAGE}", "ENV LD_LIBRARY_PATH=/python/so PYTHONHOME=/python"]
        said = client.import_image_from_data(content, REPOSITORY, tag, changes=changes)
        if "error" in str(said):
            raise SandboxStartError(f"the relay's image cannot be imported: {said}") from None
    return name


@functools.lru_cache(1)
def archive() -> bytes:
    """The root file system, the same bytes for the same Python.

    Raises:
        SandboxStartError: this Python does not show what it is made of.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-B", "-c", _PROBE, str(_TOP)], capture_output=True, check=True, timeout=60, env={}
        )
        library, modules, mapped = json.loads(done.stdout)
        interpreter = _interpreter(Path(python))
    except (OSError, subprocess.SubprocessError, ValueError, struct.error) as e:
        raise SandboxStartError(f"the relay's image cannot be made of {python}: {e}") from e
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        _add(tar, "python/bin/python3", Path(python).read_bytes(), 0o755)
        _add(tar, interpreter.strip("/"), Path(interpreter).read_bytes(), 0o755)
        inside = f"python/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        for file in sorted({*modules, f"{library}/os.py"}):
            if Path(file).is_relative_to(library):
                name = f"{inside}/{Path(file).relative_to(library)}"
                _add(tar, name, Path(file).read_bytes())
                if file.endswith(".py"):
                    _add(tar, _cached(name), _compiled(file))
        for file in mapped:
            is_library = ".so" in Path(file).name and not Path(file).is_relative_to(library)
            if is_library and Path(file).is_file():
                first, *links = _names(file)
                _add(tar, f"python/so/{first}", Path(file).read_bytes(), 0o755)
                for link in links:
                    info = tarfile.TarInfo(f"python/so/{link}")
                    info.type, info.linkname = tarfile.SYMTYPE, first
                    tar.addfile(info)
        for name in _PRODUCT:
            _add(tar, f"product/{name}", (_TOP / name).read_bytes())
            _add(tar, _cached(f"product/{name}"), _compiled(str(_TOP / name)))
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def _cached(name: str) -> str:
    path = Path(name)
    return str(path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc")


def _compiled(file: str) -> bytes:
    """Bytecode that is not held against its source's date."""
    with tempfile.NamedTemporaryFile() as target:
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(file, target.name, dfile=Path(file).name, doraise=True, invalidation_mode=mode)
        return Path(target.name).read_bytes()


def _interpreter(program: Path) -> str:
    """The dynamic linker that a program asks for (elf(5), PT_INTERP)."""
    data = program.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("it is no 64-bit ELF program")
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", data, offset + number * size)
        if kind == _PT_INTERP:
            return data[start : start + length - 1].decode()
    raise ValueError("it is linked statically")


def _names(file: str) -> list[str]:
    """A library's own name first, and those of the links to it, one of which is what programs ask for."""
    real = os.path.realpath(file)
    links = Path(file).parent.glob(f"{Path(file).name.partition('.so')[0]}.so*")
    return [
        Path(file).name,
        *sorted({link.name for link in links if os.path.realpath(link) == real} - {Path(file).name}),
    ]
