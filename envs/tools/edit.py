"""Tool `search_replace`: an old text gives way to a new one, wherever in the file it stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, boolean, parameters, refuse, with_optional
from envs.tools.matching import Match, apply, exact_matches, line_number, loose_matches, nearest_line
from envs.tools.text_files import PATH, Refusal, encode, read_text, write_text

_MAX_NAMED_LINES = 5
_MAX_COUNTED = 100
_MAX_QUOTED = 200


class SearchReplace(CheckedTool):
    """Replaces a text that stands exactly once in a file, or every one with `replace_all`.

    Line endings are not part of the comparison: in a file whose lines all end in CRLF they still do afterwards.

    A lenient one (`strict=False`) looks again where the exact text does not stand: it compares whole lines, up to white
    space at their ends and to a common indentation, and moves the new text to the indentation of the place.
    """

    name = "search_replace"
    description = "Replace a text in a file by another. The old text must stand in it exactly once."
    parameters = with_optional(
        parameters(
            path=PATH,
            old_text={
                "type": "string",
                "minLength": 1,
                "description": "the text to replace, with its indentation and enough lines around it to be unique",
            },
            new_text={"type": "string", "description": "the text to put in its place"},
        ),
        replace_all=boolean("replace every place where the old text stands"),
    )

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with `ok`, or why nothing was changed."""
        path, replace_all = arguments["path"], arguments.get("replace_all", False)
        old, new = (arguments[name].replace("\r\n", "\n") for name in ("old_text", "new_text"))
        try:
            encode(old, "old_text")
            encode(new, "new_text")
            if old == new:
                raise Refusal("old_text and new_text are the same")
            content = (await read_text(path, sandbox)).decode()
            # In a thread: a long file that repeats itself takes its time.
            changed, said = await asyncio.to_thread(self._replace, path, content, old, new, replace_all)
            await write_text(path, changed.encode(), sandbox)
        except Refusal as reason:
            return refuse(str(reason))
        return ToolResult(said)

    def _replace(self, path: str, content: str, old: str, new: str, replace_all: bool) -> tuple[str, str]:
        # Mixed line endings stay as they are: then only texts within a line, or with the right endings, are found.
        has_crlf = content.count("\r\n") == content.count("\n") > 0
        text = content.replace("\r\n", "\n") if has_crlf else content
        most, remark = (None if replace_all else _MAX_COUNTED), ""
        matches = exact_matches(text, old, new, most)
        if not matches and not self.strict:
            matches, remark = loose_matches(text, old, new, most), ", up to white space"
        _require_one_place(path, text, old, matches, replace_all)
        changed = apply(text, matches)
        times = f", replaced {len(matches)} times" if len(matches) > 1 else ""
        return changed.replace("\n", "\r\n") if has_crlf else changed, f"ok{times}{remark}"


def _require_one_place(path: str, text: str, old: str, matches: list[Match], replace_all: bool) -> None:
    if not matches:
        near = nearest_line(text, old)
        hint = f"; the nearest is line {near[0]}: {_quoted(near[1])}" if near else ""
        raise Refusal(f"old_text is not in {path}{hint}")
    if len(matches) > 1 and not replace_all:
        numbers = [str(line_number(text, match.start)) for match in matches[:_MAX_NAMED_LINES]]
        more = ", ..." if len(matches) > _MAX_NAMED_LINES else ""
        times = f"{len(matches)} times" if len(matches) < _MAX_COUNTED else f"{_MAX_COUNTED} times or more"
        raise Refusal(
            f"old_text is {times} in {path}, at lines {', '.join(numbers)}{more}: "
            "add lines around it, or set replace_all"
        )


def _quoted(line: str) -> str:
    return line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}..."
