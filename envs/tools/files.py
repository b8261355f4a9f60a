"""Tools on one file: `read_file`, `write_file`, `edit_line`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, integer, parameters, refuse, require_positive, with_optional
from envs.tools.text_files import LINE, PATH, Refusal, encode, plural, read_text, write_text

_MAX_NUMBERED_BYTES = 8 * 2**20
"""Of a file that is shown in parts."""
_MAX_LINE_CHARACTERS = 2000
"""Shown of one line, where lines are numbered."""
_MAX_SHOWN_CHARACTERS = 2**16
"""Of all lines that one call shows."""
_WHOLE = parameters(path=PATH)
_IN_PARTS = with_optional(
    _WHOLE,
    offset=integer("number of the first line to show, from 1"),
    limit=integer("how many lines to show"),
)


class ReadFile(CheckedTool):
    """Shows a text file as it is, without its last line ending (the chat template adds one).

    With `numbered`, lines have their numbers before them, `offset` and `limit` choose some of them, and long files
    and lines are cut, with what was left out named.
    """

    name = "read_file"
    description = "Show a text file."
    parameters = _WHOLE

    def __init__(
        self,
        numbered: bool = False,
        max_lines: int = 1000,
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose the form.

        Args:
            numbered: number the lines, and let the model read parts of a file.
            max_lines: with `numbered`, the most that one call shows.
            name: see `CheckedTool`.
            description: see `CheckedTool`.
            strict: unknown arguments and an offset behind the end of the file are refused.

        Raises:
            ValueError: a value is too small, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_lines=max_lines)
        self.numbered, self.max_lines = numbered, max_lines
        if numbered:
            self.description = description or "Show a text file, or lines of it, with line numbers."
            self.parameters = _IN_PARTS

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the file's text."""
        path = arguments["path"]
        try:
            if not self.numbered:
                content = await read_text(path, sandbox)
                return ToolResult(content.decode().removesuffix("\n").removesuffix("\r"))
            content = await read_text(path, sandbox, _MAX_NUMBERED_BYTES)
        except Refusal as reason:
            return refuse(str(reason))
        lines = LINE.findall(content)
        first, most = int(arguments.get("offset", 1)), min(int(arguments.get("limit", self.max_lines)), self.max_lines)
        if self.strict and first > max(1, len(lines)):
            return refuse(f"{path} has {plural(len(lines), 'line')}, no line {first}")
        shown: list[str] = []
        left = _MAX_SHOWN_CHARACTERS
        for number, line in enumerate(lines[first - 1 : first - 1 + most], first):
            numbered = f"{number}\t{_shown(line)}"
            left -= len(numbered)
            if left < 0:
                break
            shown.append(numbered)
        rest = len(lines) - (first - 1) - len(shown)
        if rest > 0:
            shown.append(f"... and {plural(rest, 'more line')}")
        return ToolResult("\n".join(shown) or "(no lines)")


class WriteFile(CheckedTool):
    """Writes a whole file as it is given, making its folders; what was there is gone."""

    name = "write_file"
    description = "Create a text file, or replace all of it."
    parameters = parameters(path=PATH, content={"type": "string", "description": "the whole new text of the file"})

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with `ok`, or why nothing was written."""
        try:
            await write_text(arguments["path"], encode(arguments["content"], "content"), sandbox)
        except Refusal as reason:
            return refuse(str(reason))
        return ToolResult("ok")


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
            new_lines = encode(arguments["text"].replace("\r\n", "\n").removesuffix("\n"), "text").split(b"\n")
            lines = LINE.findall(await read_text(path, sandbox))
        except Refusal as reason:
            return refuse(str(reason))
        if not 1 <= number <= len(lines):
            return refuse(f"{path} has {len(lines)} lines, no line {number}")
        old = lines[number - 1]
        ending = next((e for e in (b"\r\n", b"\n") if old.endswith(e)), b"")
        # A last line without an ending takes the one of the lines above between several new lines.
        between = ending or (b"\r\n" if lines[0].endswith(b"\r\n") else b"\n")
        lines[number - 1] = between.join(new_lines) + ending
        try:
            await write_text(path, b"".join(lines), sandbox)
        except Refusal as reason:
            return refuse(str(reason))
        return ToolResult("ok")


def _shown(line: bytes) -> str:
    characters = line.decode().removesuffix("\n").removesuffix("\r")
    if len(characters) <= _MAX_LINE_CHARACTERS:
        return characters
    return f"{characters[:_MAX_LINE_CHARACTERS]}... ({len(characters)} characters)"
