"""Copies of sandboxes' writable layers: what a snapshot holds, and what a fork starts from.

A sandbox's root is an overlay: what it wrote lies in the upper layer, on a tmpfs of its own. A snapshot is a copy of
that layer on another tmpfs, /snapshots/<id>, and a sandbox that starts from the snapshot has it as one more lower
layer, whatever its size. Who made the tree may still be at it, and made it as they liked: every name is looked up
relative to a folder that is already open, no symbolic link is followed, and depth and number are bounded.

Runs in children of the launcher, as root of the fork server's world, and ends them with 0 or an `errno`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from dataclasses import dataclass
from typing import NoReturn

from envs.sandbox import linux, rootfs

FOLDER = "/snapshots"

_MAX_ENTRIES = 100_000
_MAX_DEPTH = 1000
_PATH_MAX = 4096
_CHUNK = 2**24
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"
"""The one mark of overlayfs that says something of the tree; the others are of the mount that it was part of."""


_TAR = ("tar", "--numeric-owner", "--xattrs", "--xattrs-include=user.*")


_OF_TAR = {resource.RLIMIT_AS: 2**29, resource.RLIMIT_CPU: 60, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 256}
"""Limits of the program that unpacks an archive of anybody's making: bytes, seconds, open files."""


def mount(folder: str, size: int) -> None:
    """Mount a tmpfs. A file takes a page at least; without a bound, empty files would take kernel memory instead."""
    options = f"mode=0755,size={size},nr_inodes={max(size // 4096, 64)}"
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def copy(monitor: int, snapshot: str, max_bytes: int) -> NoReturn:
    """Make a layer of what the sandbox of the bubblewrap `monitor` has written."""
    code = errno.EIO
    try:
        folder = _make(snapshot, max_bytes)
        # What the monitor has for a root directory is the world of the launcher, with the sandbox's disk mounted.
        copy_folder(f"/proc/{monitor}/root/disk/upper", folder)
        code = 0
    except OSError as e:
        code = e.errno or code
    finally:
        os._exit(code)


def archive(snapshot: str, output: int) -> NoReturn:
    """Write a layer to a file descriptor, as a tar archive."""
    try:
        os.dup2(output, 1)
        os.execvp(_TAR[0], [*_TAR, "--create", "--directory", f"{FOLDER}/{snapshot}", "."])
    except OSError:
        pass
    finally:
        os._exit(errno.ENOENT)


def extract(snapshot: str, max_bytes: int, uid: int, source: int) -> NoReturn:
    """Make a layer of what `archive` wrote, or somebody else did: in a sandbox that sees nothing but the layer."""
    try:
        folder = _make(snapshot, max_bytes)
        os.chown(folder, uid, uid)
        os.dup2(source, 0)
        # The mount bounds its bytes and files; no archive takes tar more than this.
        for what, most in _OF_TAR.items():
            resource.setrlimit(what, (most, most))
        if uid:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.execv(
            rootfs.BWRAP,
            [
                *(rootfs.BWRAP, "--unshare-all", "--new-session", "--die-with-parent", "--cap-drop", "ALL"),
                *(*rootfs.bwrap_binds(python=False), *rootfs.bwrap_links(), "--bind", folder, "/layer", "--"),
                *(*_TAR, "--extract", "--preserve-permissions", "--no-same-owner", "--directory", "/layer"),
            ],
        )
    except OSError as e:
        os._exit(e.errno or errno.EIO)
    finally:
        os._exit(errno.EIO)


def _make(snapshot: str, max_bytes: int) -> str:
    """A tmpfs that all later children of the launcher see."""
    folder = f"{FOLDER}/{snapshot}"
    os.mkdir(folder)  # noqa: PTH102
    mount(folder, max_bytes)
    return folder


def copy_folder(source: str, target: str) -> None:
    """As `copy_tree`, by path."""
    here = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    there = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    copy_tree(here, there)


def copy_tree(source: int, target: int) -> None:
    """Copy what is in a folder into an empty one: all attributes, hard links, and overlayfs's marks of what is gone.

    What vanishes meanwhile is left out.

    Args:
        source: directory descriptor.
        target: directory descriptor, on another file system.

    Raises:
        OSError: ENOSPC: no room; E2BIG: more than 100,000 entries, or deeper than 1000 folders.
    """
    _Copy(target).run(source)


class _Copy:
    """One copy. Without recursion: a tree may be deeper than Python's stack."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._num_entries = 0
        self._links: dict[tuple[int, int], str] = {}
        """Inode -> the path, below the target, to which it was copied first."""

    def run(self, source: int) -> None:
        stack = [_Folder(source, self._target, "", _names(source))]
        try:
            while stack:
                folder = stack[-1]
                if folder.names:
                    self._num_entries += 1
                    if self._num_entries > _MAX_ENTRIES or len(stack) > _MAX_DEPTH:
                        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
                    with contextlib.suppress(FileNotFoundError):
                        self._copy(folder.names.pop(), folder, stack)
                else:
                    _copy_attributes(folder.source, folder.target)
                    stack.pop().close()
        finally:
            for folder in stack:
                folder.close()

    def _copy(self, name: str, folder: _Folder, stack: list[_Folder]) -> None:
        """Copy one entry; a folder only gets made, and onto the stack."""
        here, there = folder.source, folder.target
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        mode, inode = status.st_mode, (status.st_dev, status.st_ino)
        if stat.S_ISDIR(mode):
            source = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=here)
            os.mkdir(name, 0o700, dir_fd=there)
            target = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=there)
            stack.append(_Folder(source, target, f"{folder.path}{name}/", _names(source)))
            return
        if status.st_nlink > 1:
            if inode in self._links:
                os.link(self._links[inode], name, src_dir_fd=self._target, dst_dir_fd=there, follow_symlinks=False)
                return
            path = f"{folder.path}{name}"
            if len(os.fsencode(path)) < _PATH_MAX:
                self._links[inode] = path
        if stat.S_ISREG(mode):
            _copy_file(name, here, there)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=there, follow_symlinks=False)
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=there, follow_symlinks=False)
        elif stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and status.st_rdev == 0):
            # The device 0/0 is overlayfs's mark of a name that the layers below have and this one has not.
            os.mknod(name, mode, 0, dir_fd=there)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=there, follow_symlinks=False)
        # A socket is nothing without the process that listens on it.


@dataclass
class _Folder:
    """A folder that is being copied."""

    source: int
    target: int
    path: str
    """Of the target, below the copy's top, with a slash at its end."""
    names: list[str]
    """What is left to copy."""

    def close(self) -> None:
        """Close both descriptors, but for those of the caller."""
        if self.path:
            os.close(self.source)
            os.close(self.target)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _copy_file(name: str, here: int, there: int) -> None:
    source = os.open(name, _OPEN, dir_fd=here)
    try:
        if not stat.S_ISREG(os.fstat(source).st_mode):  # it was replaced since we looked
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=there)
        try:
            done, size = 0, os.fstat(source).st_size
            while done < size and (copied := os.sendfile(target, source, done, min(size - done, _CHUNK))):
                done += copied
            _copy_attributes(source, target)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_attributes(source: int, target: int) -> None:
    """Owner, mode, extended attributes and times, in the order in which one does not undo the other."""
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for attribute in _attributes(source):
        if attribute == _OPAQUE or not attribute.startswith("user.overlay."):
            os.setxattr(target, attribute, os.getxattr(source, attribute))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _attributes(fd: int) -> list[str]:
    """Names of the extended attributes that a user may set; tmpfs has them from Linux 6.6 on."""
    try:
        return [name for name in os.listxattr(fd) if name.startswith("user.")]
    except OSError as e:
        if e.errno == errno.EOPNOTSUPP:
            return []
        raise
