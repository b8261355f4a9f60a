"""Makes the sandbox of an image what is to be graded: base state, the agent's changes, the tests' own files over both.

What is alike is left alone, and so keeps its mode. What was deleted goes. A symbolic link of the image that stands on
the way to a file that is put there goes too: through it, one file would become another.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Iterable, Mapping

from composer.contract import Sandbox
from composer.errors import GradingError

_TOO_MUCH = (errno.ENOSPC, errno.EFBIG, errno.ENAMETOOLONG, errno.EMLINK)
_MAKE_WAY = 'folder=$(dirname -- "$1"); mkdir -p -- "$folder"; chmod u+rwx -- "$folder"; rm -rf -- "$1"'


class DoesNotFitError(Exception):
    """What the agent left behind is more than the grading sandbox takes."""


async def bring_to(sandbox: Sandbox, base: Mapping[str, bytes], state: Mapping[str, bytes], task_id: str) -> None:
    """Change the files of a sandbox from one state to another.

    Args:
        sandbox: with `base` in its working directory, and whatever else is no regular file.
        base: what is there.
        state: what is to be there.
        task_id: for messages.

    Raises:
        DoesNotFitError: it is too much.
        GradingError: it cannot be done with the rights of the sandbox's user.
        SandboxError: the sandbox failed.
    """
    changed = {path: content for path, content in state.items() if base.get(path) != content}
    gone = base.keys() - state.keys()
    folders = {folder for path in base for folder in _above(path)}
    in_the_way = (changed.keys() & folders) | await _links_above(sandbox, changed, task_id)
    if remove := [*gone, *in_the_way]:
        paths = "".join(f"./{path}\0" for path in remove).encode(errors="surrogateescape")
        removed = await sandbox.exec(["xargs", "-0", "rm", "-rf", "--"], stdin=paths)
        if removed.exit_code:
            said = " ".join(removed.output[-300:].decode(errors="replace").split()) or "no output"
            raise GradingError(
                f"{len(remove)} files that were deleted or replaced cannot be removed from the grading sandbox of task "
                f"{task_id}: exit code {removed.exit_code}: {said}."
            )
    for path, content in changed.items():
        await put(sandbox, path, content, task_id)


async def put(sandbox: Sandbox, path: str, content: bytes, task_id: str) -> None:
    """Write a file, also where one is that cannot be written to but can be replaced.

    Raises:
        DoesNotFitError, GradingError, SandboxError: as of `bring_to`.
    """
    try:
        try:
            await sandbox.write(path, content)
        except (PermissionError, IsADirectoryError):
            await sandbox.exec(["sh", "-c", _MAKE_WAY, "sh", path])
            await sandbox.write(path, content)
    except OSError as error:
        if error.errno in _TOO_MUCH:
            raise DoesNotFitError(f"{path[:200]} does not fit: {error.strerror}") from None
        raise GradingError(
            f"{path} of task {task_id} cannot be put into its grading sandbox "
            f"({error.strerror or type(error).__name__}): its user must be able to write there."
        ) from None


async def _links_above(sandbox: Sandbox, paths: Iterable[str], task_id: str) -> set[str]:
    """The symbolic links that these paths would lead through, or to."""
    wanted = {place for path in paths for place in (path, *_above(path))}
    if not wanted:
        return set()
    found = await sandbox.exec(["find", ".", "-type", "l", "-print0"])
    if found.truncated:
        raise GradingError(f"The image of task {task_id} has too many symbolic links in its working directory.")
    links = {link.removeprefix("./") for link in found.output.decode(errors="surrogateescape").split("\0")}
    return links & wanted


def _above(path: str) -> list[str]:
    """The folders above a path, the next one first."""
    above = []
    while path := posixpath.dirname(path):
        if path == "/":
            break
        above.append(path)
    return above
