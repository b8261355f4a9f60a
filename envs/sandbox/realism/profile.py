"""A profile: what makes a sandbox look like the computer of somebody who has used it for a while.

Profiles are YAML files (profiles/); a user names one of them, or a file of their own. The fork server dresses the lower
layer of all sandboxes with it once; the rest is done for each sandbox (launcher.py, supervisor.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from envs.sandbox.realism.network import Network

FAKES = "/fakes"
"""Files of the fork server's world that are put over those of the same name in a sandbox's /proc."""


@dataclass(frozen=True)
class Profile:
    """Empty: a sandbox shows itself as it is."""

    name: str = "plain"
    user: str = "dev"
    hostname: str = "devbox"
    full_name: str = ""
    email: str = ""
    """With `full_name`, in ~/.gitconfig."""
    term: str = "dumb"
    locale: str = "C.UTF-8"
    first_process: str = "cat"
    """What PID 1 calls itself."""
    first_command: str = "/usr/bin/cat"
    """And its command line."""
    processes: tuple[str, ...] = ()
    """Names of further processes, which sleep; the first of them is PID 2."""
    uptime_s: float | None = None
    """How long the machine has run when a sandbox starts (its own clock); None: as long as the host."""
    network: Network | None = None
    """None: loopback alone."""
    devices: tuple[str, ...] = ()
    """Names in /dev, without a device behind them."""
    machine_id: bool = False
    """Whether /etc/machine-id has one, new for each backend (with Docker, for each image)."""
    kernel_command: str = ""
    """What /proc/cmdline says; empty: as on the host. `{release}` stands for the kernel's."""
    hides_hypervisor: bool = False
    """Whether /proc/cpuinfo leaves the flag `hypervisor` out."""
    folders: tuple[str, ...] = ()
    """Made at home; absolute ones elsewhere."""
    files: dict[str, str] = field(default_factory=dict)
    """Path, relative to home or absolute -> text. `{release}` in a path stands for the kernel's."""
    num_cached: int = 0
    """Small files in ~/.cache, as browsers and package managers leave them."""
    package_list: bool = False
    """Whether `dpkg -l` knows the host's packages."""
    users: tuple[str, ...] = ()
    """Further users that own nothing, from number 1 on."""
    age_days: float = 0.0
    """Files get dates spread over so many days; 0: when they were made."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """From what YAML or JSON hold.

        Raises:
            ValueError, TypeError: a key is unknown, or a value is of another kind.
        """
        known = {f.name: f for f in fields(cls)}
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"no key {unknown[0]!r}; the keys are {', '.join(known)}")
        taken = dict(values)
        if taken.get("network") is not None:
            taken["network"] = Network(**taken["network"])
        for name, value in taken.items():
            if known[name].type == "tuple[str, ...]":
                if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                    raise ValueError(f"{name} must be a list of texts")
                taken[name] = tuple(value)
        if not all(isinstance(v, str) for item in taken.get("files", {}).items() for v in item):
            raise ValueError("files must map paths to texts")
        return cls(**taken)


def dress(skel: Path, home: str, profile: Profile, release: str | None = None) -> None:
    """Add a profile's files to the lower layer of all sandboxes.

    Args:
        skel: root of that layer.
        home: absolute path of the user's home in it.
        profile: what to add.
        release: of the kernel; None: this machine's.
    """
    etc = skel / "etc"
    release = release or platform.release()
    if profile.machine_id:
        (etc / "machine-id").write_text(f"{os.urandom(16).hex()}\n")
    if profile.full_name:
        git = f"[user]\n\tname = {profile.full_name}\n\temail = {profile.email}\n"
        (skel / home.lstrip("/") / ".gitconfig").write_text(git)
    for number, user in enumerate(profile.users, start=1):
        with (etc / "passwd").open("a") as passwd, (etc / "group").open("a") as group:
            passwd.write(f"{user}:x:{number}:{number}:{user}:/usr/sbin:/usr/sbin/nologin\n")
            group.write(f"{user}:x:{number}:\n")
    for folder in profile.folders:
        _below(skel, home, folder).mkdir(parents=True, exist_ok=True)
    for path, text in profile.files.items():
        target = _below(skel, home, path.replace("{release}", release))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if text.startswith("#!"):
            target.chmod(0o755)
    dice = random.Random(profile.name)
    for _ in range(profile.num_cached):
        name = dice.randbytes(20).hex()
        cached = _below(skel, home, f".cache/pip/http-v2/{name[0]}/{name[1]}/{name}")
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(dice.randbytes(200))
    if profile.package_list:
        with contextlib.suppress(OSError):
            (skel / "var/lib/dpkg").mkdir(parents=True, exist_ok=True)
            shutil.copy("/var/lib/dpkg/status", skel / "var/lib/dpkg/status")


def write_fakes(folder: Path, profile: Profile) -> None:
    """Write the files that lie over those of the same name in /proc."""
    folder.mkdir()
    if profile.kernel_command:
        (folder / "cmdline").write_text(profile.kernel_command.replace("{release}", platform.release()) + "\n")
    if profile.hides_hypervisor:
        lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
        (folder / "cpuinfo").write_text("".join(_without_hypervisor(line) for line in lines))


def _without_hypervisor(line: str) -> str:
    return line.replace(" hypervisor", "") if line.startswith("flags") else line


def fakes(profile: Profile) -> list[str]:
    """Names of those files."""
    return [n for n, there in (("cmdline", profile.kernel_command), ("cpuinfo", profile.hides_hypervisor)) if there]


def spread_dates(skel: Path, profile: Profile) -> None:
    """Give files dates of the past: the same for a profile, and no two folders of one day."""
    if not profile.age_days:
        return
    dice, now = random.Random(profile.name), time.time()
    for path in _bottom_up(skel):
        then = int(now - 86400 * dice.uniform(0.5, profile.age_days))
        with contextlib.suppress(OSError):
            if path.endswith(".py"):
                _stamp(path, then)
            os.utime(path, (then, then), follow_symlinks=False)


def _stamp(source: str, date: int) -> None:
    """Note a source's new date in what it was compiled to (PEP 552: bytes 8 to 11, if bytes 4 to 7 are 0)."""
    folder, name = os.path.split(source)
    compiled = os.path.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc")  # noqa: PTH118
    with contextlib.suppress(FileNotFoundError), open(compiled, "r+b") as file:  # noqa: PTH123
        if file.read(8)[4:] == bytes(4):
            file.write(date.to_bytes(4, "little"))


def _bottom_up(top: Path) -> Iterator[str]:
    for folder, _, files in os.walk(top, topdown=False):
        for name in files:
            yield os.path.join(folder, name)  # noqa: PTH118
        yield folder


def _below(skel: Path, home: str, path: str) -> Path:
    return skel / (path.lstrip("/") if path.startswith("/") else f"{home.lstrip('/')}/{path}")
