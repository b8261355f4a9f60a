"""What lies where: `find` in a sandbox, and the tools `list_dir`, `list_files` and `glob` on top of it.

Names travel between NUL bytes, so that one with a line break is one; they are counted, sorted and cut inside of the
sandbox, whose limit for a command's output a large tree would pass. Needs GNU's find, sort and head in the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer.contract import ExecResult, Sandbox, ToolResult
from envs.tools.base import CheckedTool, parameters, refuse, require_positive, text, with_optional
from envs.tools.globs import glob_to_regex
from envs.tools.text_files import PATH, Refusal

FIND_TIMEOUT_S = 20.0
_NO_FOLDER, _CLOSED, _NO_PROGRAM = 101, 102, 103
"""Exit codes that the shell has no use for; it ends with 2 where it cannot fork."""
GNU_FIND = '[ "$(find . -maxdepth 0 -printf x 2>/dev/null)" = x ]'
"""Whether the sandbox has it, for `sh`: another one's errors would look like a search that found nothing."""
_FIND = f"""
folder=$1 most=$2 format=$3; shift 3
[ -d "$folder" ] || exit {_NO_FOLDER}
[ -r "$folder" ] && [ -x "$folder" ] && cd "$folder" || exit {_CLOSED}
{GNU_FIND} || exit {_NO_PROGRAM}
export LC_ALL=C
find . -mindepth 1 "$@" -printf x 2>/dev/null | wc -c
find . -mindepth 1 "$@" -printf "$format\\0" 2>/dev/null | sort -z | head -z -n "$most"
exit 0
"""
"""`find` also fails where a folder further down is closed, or goes while it looks: what it found is the answer."""


@dataclass(frozen=True)
class Found:
    """What `find` found."""

    names: list[bytes]
    """The first of them, sorted by their bytes."""
    total: int

    @property
    def rest(self) -> list[str]:
        """The line that ends a list of which not all is shown; empty if all is."""
        left = self.total - len(self.names)
        return [f"... and {left} more"] if left > 0 else []


async def find(
    path: str, expression: Sequence[str], sandbox: Sandbox, most: int, timeout_s: float, format: str = "%P"
) -> Found:
    """Run `find` below a folder.

    Args:
        path: the folder; it may be a symbolic link.
        expression: of `find`, without an action; paths begin with `./`.
        sandbox: where the folder is.
        most: how many names to return.
        timeout_s: wall time.
        format: as of `-printf`.

    Raises:
        Refusal: there is no such folder, it is closed, or the search took too long.
        SandboxError: the sandbox failed.
    """
    # `./` before a relative path, or the shell's `[` and `cd` would take some names for options.
    folder = path if path.startswith("/") else f"./{path}"
    argv = ["sh", "-c", _FIND, "sh", f"{folder}/", str(most), format, *expression]
    result = await sandbox.exec(argv, timeout_s=timeout_s)
    if result.timed_out:
        raise Refusal(f"listing {path} took too long")
    if result.exit_code == _CLOSED:
        raise Refusal(f"no permission to list {path}")
    if result.exit_code == _NO_FOLDER:
        raise Refusal(f"no such folder: {path}")
    if result.exit_code == _NO_PROGRAM:
        raise Refusal(f"listing {path} needs GNU find, sort and head, which do not run here")
    if result.exit_code != 0:
        raise Refusal(f"listing {path} failed: {last_words(result)}")
    total, _, names = before_the_cut(result).partition(b"\n")
    return Found(names.split(b"\0")[:-1], int(total) if total.strip().isdigit() else 0)


def before_the_cut(result: ExecResult) -> bytes:
    """A command's output; where its middle was dropped, what came before it."""
    return result.output[: len(result.output) // 2] if result.truncated else result.output


def last_words(result: ExecResult) -> str:
    """How a command ended that should not have, in a few words."""
    return show_name(result.output.strip()[-200:]) or f"exit code {result.exit_code}"


def show_name(name: bytes) -> str:
    r"""A file's name on one line: what is no text, or would end the line, as Python writes it.

    Example:
        >>> show_name(b"a\nb\xff")
        'a\\nb\\xff'
    """
    shown = name.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


class ListDir(CheckedTool):
    """Lists what a folder holds, folders first and with a slash, links with an at sign; .git is left out."""

    name = "list_dir"
    description = "List the files and folders in a folder."
    parameters = parameters(path=PATH)

    def __init__(
        self,
        max_entries: int = 200,
        timeout_s: float = FIND_TIMEOUT_S,
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose after how many entries the list ends with a count of the rest, and how long it may take.

        Raises:
            ValueError: a value is too small, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_entries=max_entries, timeout_s=timeout_s)
        self.max_entries, self.timeout_s = max_entries, timeout_s

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the names."""
        seen = ["-maxdepth", "1", "-not", "-name", ".git"]
        try:
            found = await find(arguments["path"], seen, sandbox, self.max_entries, self.timeout_s, "%y%P")
        except Refusal as reason:
            return refuse(str(reason))
        marks = {b"d": "/", b"l": "@"}
        shown = [show_name(name[1:]) + marks.get(name[:1], "") for name in found.names]
        return ToolResult("\n".join([*shown, *found.rest]) or "(empty folder)")


class FileFinder(CheckedTool):
    """A tool that answers with the files that `find` finds."""

    def __init__(
        self,
        max_files: int = 200,
        timeout_s: float = FIND_TIMEOUT_S,
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose after how many files the list ends with a count of the rest, and how long it may take.

        Raises:
            ValueError: a value is too small, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_files=max_files, timeout_s=timeout_s)
        self.max_files, self.timeout_s = max_files, timeout_s

    async def answer(self, path: str, expression: Sequence[str], sandbox: Sandbox) -> ToolResult:
        """The paths, relative to the folder `path`, a line each; `expression` as of `find`.

        Raises:
            SandboxError: the sandbox failed.
        """
        try:
            found = await find(path, expression, sandbox, self.max_files, self.timeout_s)
        except Refusal as reason:
            return refuse(str(reason))
        return ToolResult("\n".join([*map(show_name, found.names), *found.rest]) or "(no files)")


class Glob(FileFinder):
    """Lists the files whose path fits a glob pattern, sorted; .git is left out, other hidden folders are not."""

    name = "glob"
    description = "Find files by a pattern of their path, such as **/*.py or src/*_test.go."
    parameters = with_optional(
        parameters(pattern=text("glob pattern; without a slash it is looked for in every folder", max_length=1000)),
        path=text("folder to look in, and to which the pattern is relative; by default the repository"),
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the paths, relative to the folder that was looked in."""
        regex = rf"\./({glob_to_regex(arguments['pattern'])})"
        fits = ["-name", ".git", "-prune", "-o", "-type", "f", "-regextype", "posix-extended", "-regex", regex]
        return await self.answer(arguments.get("path", "."), fits, sandbox)


class ListFiles(FileFinder):
    """Lists the files under a folder, sorted, one a line; hidden folders such as .git are left out."""

    name = "list_files"
    description = "List the files under a folder."
    parameters = parameters(path=PATH)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the paths, relative to the folder."""
        return await self.answer(arguments["path"], ["-name", ".*", "-prune", "-o", "-type", "f"], sandbox)
