"""What the user of a sandbox has on its disks: every file with its hash, and which of them a package brought along.

It is made by the machine's own find, sha256sum and readlink. Whoever worked in the sandbox was not root and cannot have
changed those.
"""

from __future__ import annotations

import base64
import binascii
import csv
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer.contract import Sandbox
from composer.errors import SandboxError

# Other disks than the root's are looked into only where a user can have something: the system's own are none of his.
_LIST = r"""
root=$(stat -c %d /)
list() {
    # A folder that cannot be listed and a program that cannot be read can be used all the same.
    find "$1" -xdev -type d -user "$(id -u)" ! -perm -700 -exec chmod u+rwx {} \; 2>/dev/null
    find "$1" -xdev -type f -user "$(id -u)" ! -perm -400 -exec chmod u+r {} + 2>/dev/null
    find "$1" -xdev -type f -user "$(id -u)" -exec sha256sum -- {} + 2>/dev/null
    find "$1" -xdev -type l -user "$(id -u)" -exec sh -c \
        'for f; do printf "link %s\n" "$f"; done' sh {} + 2>/dev/null
}
list /
for place in "$HOME" "$1" /tmp /var/tmp; do
    [ -d "$place" ] && [ "$(stat -c %d "$place")" != "$root" ] && list "$place"
done
echo complete
"""
_RESOLVE = r"""
case $1 in '~/'*) set -- "$HOME/${1#??}" ;; '$HOME/'*) set -- "$HOME/${1#??????}" ;; esac
found=$(command -v -- "$1") && echo "$found" && /usr/bin/readlink -f -- "$found"
"""
_SYSTEM_PATH = {"PATH": "/usr/bin:/bin"}
_LINE = re.compile(r"(\\?)([0-9a-f]{64})  (/.*)$")
_TIMEOUT_S = 300.0
LINK = "link"
_PACKAGE_PLACES = re.compile(r"/(?:node_modules|\.cargo/(?:bin|registry)|\.rustup|go/(?:bin|pkg)|\.gem|\.npm|\.nvm)/")
_RECORD = re.compile(r"(.*)/[^/]+\.dist-info/RECORD$")


@dataclass(frozen=True)
class Inventory:
    """The files of a sandbox's user."""

    files: dict[str, str]
    """Absolute path -> SHA-256 in hex, or `LINK`."""
    packaged: dict[str, str] = field(default_factory=dict)
    """Absolute path -> hash that the RECORD of an installed Python package gives for it; "" if it gives none."""

    def is_packaged(self, path: str) -> bool:
        """Whether a package manager put a file there, and it is still as it was."""
        if _PACKAGE_PLACES.search(path):
            return True
        return path in self.packaged and self.packaged[path] in ("", self.files.get(path))

    def new_since(self, other: Inventory) -> dict[str, str]:
        """The files that the other does not have, or not so."""
        return {path: digest for path, digest in self.files.items() if other.files.get(path) != digest}


async def take_inventory(sandbox: Sandbox) -> Inventory:
    """Look at a sandbox in which nothing is going on; all that its user has becomes readable for him.

    Raises:
        SandboxError: the sandbox failed.
        OSError: EFBIG: there are too many files to look at, or it takes too long.
    """
    listed = await sandbox.exec(["sh", "-c", _LIST, "sh", sandbox.workdir], env=_SYSTEM_PATH, timeout_s=_TIMEOUT_S)
    lines = listed.output.decode(errors="surrogateescape").splitlines()
    if listed.truncated or listed.timed_out:
        raise OSError(27, f"{len(lines)} files and more are too many to look at")
    if not lines or lines[-1] != "complete":
        raise SandboxError(
            f"sandbox {sandbox.id} cannot be looked at: {listed.output[-200:]!r}; it needs find and sha256sum"
        )
    files: dict[str, str] = {}
    for line in lines:
        if match := _LINE.match(line):
            escaped, digest, path = match.groups()
            files[path.replace("\\n", "\n").replace("\\\\", "\\") if escaped else path] = digest
        elif line.startswith("link /"):
            files[line.removeprefix("link ")] = LINK
    packaged: dict[str, str] = {}
    for path in files:
        if match := _RECORD.match(path):
            try:
                packaged |= read_record(await sandbox.read(path), match.group(1))
            except OSError:
                continue
    return Inventory(files, packaged)


def read_record(record: bytes, folder: str) -> dict[str, str]:
    r"""The files of an installed Python package, by the RECORD in its `.dist-info`.

    Example:
        >>> read_record(b"../bin/tool,sha256=AAE,3\na.py,,\n", "/v/lib")
        {'/v/bin/tool': '0001', '/v/lib/a.py': ''}
    """
    found = {}
    for row in csv.reader(record.decode(errors="replace").splitlines()):
        if not row:
            continue
        kind, _, encoded = (row[1] if len(row) > 1 else "").partition("=")
        try:
            digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex() if kind == "sha256" else ""
        except (binascii.Error, ValueError):
            continue
        found[posixpath.normpath(posixpath.join(folder, row[0]))] = digest
    return found


async def resolve(sandbox: Sandbox, names: list[str], env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Where a command finds its programs: name -> the path on PATH, and what it leads to; absent: nowhere.

    Raises:
        SandboxError: the sandbox failed.
    """
    found = {}
    for name in dict.fromkeys(names):
        asked = await sandbox.exec(["/bin/sh", "-c", _RESOLVE, "sh", name], env=env)
        lines = asked.output.decode(errors="surrogateescape").splitlines()
        if asked.exit_code == 0 and len(lines) == 2:
            place = lines[0] if lines[0].startswith("/") else posixpath.join(sandbox.workdir, lines[0])
            found[name] = posixpath.normpath(place), lines[1]
    return found
