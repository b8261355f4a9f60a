"""A root file system for sandboxes, made of this machine's own programs: what cannot be pulled has to be packed.

`python -m tests.integration.envs.sandbox.docker_image FILE` writes it to a file; `full=False` leaves bash and Python
out.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from envs.sandbox.packages import pytest_files

SMALL = """
    sh cat chmod cp date dd echo env false head id ln ls mkdir mkfifo mv pwd readlink rm seq sleep sha256sum stat tail
    tar tee touch tr true truncate uname wc yes base64 dirname basename sort find grep sed
"""
FULL = f"""
    {SMALL} awk bash curl env getent git hostname ip less make man mknod mktemp mount nproc openssl ps setsid ssh sudo
    systemctl timeout unshare vi xargs df du cut printf test expr uniq
"""
MANUALS = "/usr/share/man/man1"
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "ensurepip", "tkinter", "turtledemo", "lib2to3"}
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"


def root_file_system(full: bool = True) -> Path:
    """A tarball in the user's cache; one is made if there is none of these very files."""
    files = _files(full)
    described = "".join(f"{path} {file} {_stamp(file)}\n" for path, file in sorted(files.items()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "composer-tests"
    folder.mkdir(parents=True, exist_ok=True)
    tarball = folder / f"{'full' if full else 'small'}-{hashlib.sha256(described.encode()).hexdigest()[:16]}.tar"
    if not tarball.exists():
        part = tarball.with_suffix(f".{os.getpid()}")
        _write(part, files, full)
        part.replace(tarball)
    return tarball


def _stamp(file: str) -> str:
    status = Path(file).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _files(full: bool) -> dict[str, str]:
    """Path in the image -> path here."""
    programs = [
        found for name in (FULL if full else SMALL).split() if (found := shutil.which(name, path="/usr/bin:/bin"))
    ]
    files = {f"usr/bin/{Path(program).name}": os.path.realpath(program) for program in programs}
    binaries = set(files.values())
    if full:
        prefix = Path(sys.base_prefix)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        library = prefix / "lib" / version
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        files[f"{str(prefix).strip('/')}/bin/{version}"] = python
        binaries.add(python)
        for top, folders, names in os.walk(library):
            folders[:] = [f for f in folders if f not in LEFT_OUT and not f.startswith("config-")]
            for name in names:
                path = f"{top}/{name}"
                if Path(path).is_file() and not name.endswith(".a"):
                    files[path.strip("/")] = path
                    if name.endswith(".so"):
                        binaries.add(path)
        pages = sorted(Path(MANUALS).glob("*.1.gz"))[:100]
        files |= {str(page).strip("/"): os.path.realpath(page) for page in pages if page.is_file()}
        packages = f"{str(library).strip('/')}/site-packages"
        files |= {f"{packages}/{path}": file for file, path in pytest_files()}
    for library in libraries(binaries):
        files[library.strip("/")] = os.path.realpath(library)
    return files


def libraries(binaries: set[str]) -> set[str]:
    """Shared objects, by path, that programs and shared objects are linked to."""
    shown = subprocess.run(["ldd", *sorted(binaries)], capture_output=True, text=True).stdout
    return {match[1] for match in re.finditer(r"(/\S+\.so\S*) \(0x", shown)}


def _write(tarball: Path, files: dict[str, str], full: bool) -> None:
    # Here /lib may be a link to /usr/lib; in the image it is a folder of its own, and both names are kept apart.
    with tarfile.open(tarball, "w", format=tarfile.GNU_FORMAT) as tar:
        made: set[str] = set()

        def folder(path: str, mode: int = 0o755) -> None:
            if path in ("", ".") or path in made:
                return
            folder(os.path.dirname(path))  # noqa: PTH120
            made.add(path)
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)

        folder("tmp", 0o1777)
        for path in ("etc", "dev", "proc", "sys", "root", "home", "run", "usr/bin"):
            folder(path)
        for path, content in (("etc/passwd", PASSWD), ("etc/group", b"root:x:0:\n"), ("srv/made/with.txt", b"image\n")):
            folder(os.path.dirname(path))  # noqa: PTH120
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
        links = {"bin": "usr/bin"}
        if full:
            links["usr/bin/python3"] = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        for path, target in links.items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for path, file in sorted(files.items()):
            folder(os.path.dirname(path))  # noqa: PTH120
            info = tar.gettarinfo(file, path)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.type, info.linkname = tarfile.REGTYPE, ""
            info.size = Path(file).stat().st_size
            info.mode |= 0o444
            with Path(file).open("rb") as content:
                tar.addfile(info, content)


if __name__ == "__main__":
    print(shutil.copy(root_file_system(), sys.argv[1]))
