"""What a profile adds to a running container: the first process and its like, names in /dev, and what stands in /sys.

All of it belongs to root, so the sandbox's user cannot touch it; none of it has a right that the container lacks. The
first process is a script, since any image has a shell. It goes by the name of an init, collects orphans as one does,
and ends with the container's lifetime.

What a container cannot hide is its kernel's: namespaces, the mounts, and that it has no network.
"""

from __future__ import annotations

import posixpath
import shlex

from envs.sandbox.realism.profile import Profile

PIPE = "/run/initctl"
"""In prepared images; nobody ever writes to it, so who opens it for reading sleeps, without a program to sleep by."""
TMPFS = {"/sys": f"rw,nosuid,nodev,noexec,mode=0755,size={2**18},nr_inodes=256"}
"""A file system in memory on top of those that the user can write to; nobody but root can write to this one."""
REMEDIES = {
    "marker files": "nothing here: every Docker engine puts /.dockerenv into its containers",
    "root file system": "nothing here: the engine's storage driver is what lies below /",
    "the host's paths": "a data-root of the engine that says little (dockerd --data-root): overlays name their layers",
    "masked files": "nothing here: the engine's own files in /etc, and what it hides in /proc",
    "no route": "another backend: Docker gives a container without a network nothing but loopback",
    "hypervisor": "another backend, or another machine: /proc/cpuinfo is the kernel's",
    "kernel command line": "another backend, or another machine: /proc/cmdline is the kernel's",
}
"""What would hide a tell that this backend shows whatever the profile is."""
_SCRIPT = """\
#!/bin/sh
exec </dev/null >/dev/null 2>&1
rename() {{ printf %s "$1" >/proc/self/comm; }}
for n in {processes}; do
    (rename "$n"; read -r x <{pipe}) &
done
umask 077
for n in {devices}; do printf '' >"/dev/$n"; done
umask 022
{folders}
"$(command -v sleep)" "$2" &
rename {name}
wait $!
"""


def first_program(profile: Profile) -> str:
    """The path of the first process's program in a prepared image."""
    # Its own name must be another than the one that it takes when all is ready.
    return "/sbin/init" if profile.first_process != "init" else "/sbin/systemd"


def first_arguments(lifetime_s: int) -> list[str]:
    """What it is called with; systemd has a number there that says as little."""
    return ["--deserialize", str(lifetime_s)]


def first_script(profile: Profile) -> bytes:
    """The program itself, for any POSIX shell."""
    folders = " ".join(shlex.quote(folder) for folder in profile.folders if _is_in_sys(folder))
    return _SCRIPT.format(
        processes=" ".join(map(shlex.quote, profile.processes)),
        devices=" ".join(map(shlex.quote, profile.devices)),
        pipe=PIPE,
        folders=f"mkdir -p {folders}" if folders else "",
        name=shlex.quote(name_of_first(profile)),
    ).encode()


def name_of_first(profile: Profile) -> str:
    """What the first process calls itself as soon as everything is there: the kernel keeps 15 bytes."""
    return profile.first_process.encode()[:15].decode(errors="ignore")


def covers_sys(profile: Profile) -> bool:
    """Whether /sys is the profile's: then the kernel's own is out of sight, with the control groups in it."""
    return any(_is_in_sys(folder) for folder in profile.folders)


def lies_in_image(path: str) -> bool:
    """Whether an absolute path of a profile is the image's, and not hidden in every container."""
    return not any(_is_in(path, folder) for folder in ("/sys", "/proc", "/dev", "/tmp"))


def _is_in_sys(folder: str) -> bool:
    return _is_in(folder, "/sys")


def _is_in(path: str, folder: str) -> bool:
    return posixpath.normpath(path) == folder or posixpath.normpath(path).startswith(f"{folder}/")
