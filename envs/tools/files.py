"""Tools on files: `read_file`, `edit_line`, `list_files`.

They take any path: what is reachable is decided by the sandbox, which has nothing in it to protect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, parameters, refuse, text

MAX_FILE_BYTES = 2**20
LINE = re.compile(rb"[^\n]*\n|[^\n]+")
"""A line with its ending; the last one may have none. `bytes.splitlines` also splits at lone carriage returns."""

CLOSED = 3
LIST = f"""
[ -d "$1" ] || exit 2
[ -r "$1" ] && [ -x "$1" ] || exit {CLOSED}
find "$1" -mindepth 1 -name '.*' -prune -o -type f -printf '%P\\n' 2>/dev/null
exit 0
"""
"""`find` also fails where a folder further down is closed, or goes while it looks: what it found is the answer."""

PATH = text("path relative to the repository")


class _Refusal(Exception):
    """Why a file cannot be used, in words for the model."""


async def _read_text(path: str, sandbox: Sandbox) -> bytes:
    """The bytes of a UTF-8 text file; every reason why not becomes a `_Refusal`."""
    try:
        content = await sandbox.read(path, max_bytes=MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _Refusal(f"no such file: {path}") from None
    except IsADirectoryError:
        raise _Refusal(f"{path} is a directory") from None
    except PermissionError:
        raise _Refusal(f"no permission to read {path}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _Refusal(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    if b"\0" in content:
        raise _Refusal(f"{path} is a binary file")
    try:
        content.decode()
    except UnicodeDecodeError:
        raise _Refusal(f"{path} is not UTF-8 text") from None
    return content


class ReadFile(CheckedTool):
    """Shows a text file as it is, without its last line ending (the chat template adds one)."""

    name = "read_file"
    description = "Show a text file."
    parameters = parameters(path=PATH)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the file's text."""
        try:
            content = await _read_text(arguments["path"], sandbox)
        except _Refusal as reason:
            return refuse(str(reason))
        return ToolResult(content.decode().removesuffix("\n").removesuffix("\r"))


class EditLine(CheckedTool):
    """Replaces one line; line endings (LF, CRLF) and a missing one at the end of the file stay as they are.

    `text` may hold several lines, which then take the place of the one.
    """

    name = "edit_line"
    description = "Replace one line of a text file. Lines count from 1."
    parameters = parameters(
        path=PATH,
        line={"type": "integer", "description": "number of the line, from 1"},
        text={"type": "string", "description": "the new line, with its indentation"},
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with `ok`, or why nothing was changed."""
        path, number = arguments["path"], int(arguments["line"])
        try:
            new_lines = arguments["text"].replace("\r\n", "\n").removesuffix("\n").encode().split(b"\n")
            lines = LINE.findall(await _read_text(path, sandbox))
        except UnicodeEncodeError:
            return refuse("text is not valid UTF-8")
        except _Refusal as reason:
            return refuse(str(reason))
        if not 1 <= number <= len(lines):
            return refuse(f"{path} has {len(lines)} lines, no line {number}")
        old = lines[number - 1]
        ending = next((e for e in (b"\r\n", b"\n") if old.endswith(e)), b"")
        # A last line without an ending takes the one of the lines above between several new lines.
        between = ending or (b"\r\n" if lines[0].endswith(b"\r\n") else b"\n")
        lines[number - 1] = between.join(new_lines) + ending
        try:
            await sandbox.write(path, b"".join(lines))
        except PermissionError:
            return refuse(f"no permission to write {path}")
        except OSError as error:
            return refuse(f"cannot write {path}: {error.strerror or error}")
        return ToolResult("ok")


class ListFiles(CheckedTool):
    """Lists the files under a folder, sorted, one a line; hidden folders such as .git are left out."""

    name = "list_files"
    description = "List the files under a folder."
    parameters = parameters(path=PATH)

    def __init__(self, max_files: int = 200) -> None:
        """Choose after how many files the list ends with a count of the rest."""
        self.max_files = max_files

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the paths, relative to the folder."""
        path = arguments["path"]
        # `./` before a relative path, or `find` would take `-delete` for an order.
        start = path if path.startswith("/") else f"./{path}"
        result = await sandbox.exec(["sh", "-c", LIST, "sh", f"{start}/"])
        if result.timed_out:
            return refuse(f"listing {path} took too long")
        if result.exit_code == CLOSED:
            return refuse(f"no permission to list {path}")
        if result.exit_code != 0:
            return refuse(f"no such folder: {path}")
        names = sorted(result.output.decode(errors="replace").split("\n")[:-1])
        rest = len(names) - self.max_files
        shown = names[: self.max_files] + ([f"... and {rest} more"] if rest > 0 else [])
        return ToolResult("\n".join(shown) or "(no files)")
