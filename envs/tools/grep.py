"""Tool `grep`: lines of files that fit a regular expression.

By ripgrep where the sandbox has it: its syntax, and files that .gitignore names are left out. Otherwise by GNU's grep
with extended expressions. The answers look the same: `path:line:text`, sorted by path, paths relative to the folder
that was searched. Binary files and .git are left out, and by grep files that are not UTF-8. An env whose images differ
in what they have should name `program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from composer.contract import Sandbox, ToolResult
from envs.tools.base import CheckedTool, boolean, integer, parameters, refuse, require_positive, text, with_optional
from envs.tools.globs import glob_to_regex
from envs.tools.listing import GNU_FIND, before_the_cut, last_words, show_name

GREP_TIMEOUT_S = 20.0
_MAX_LINE_CHARACTERS = 300
_MAX_RAW_LINE_BYTES = 1500
"""Of one match with its path, as it leaves the sandbox."""
_NOT_THERE, _CLOSED, _BAD_PATTERN, _NO_PROGRAM = 101, 102, 103, 104

# Patterns are tried on nothing first: an error in them must not look like a search without a result. `find` gives files
# only, so that no pipe or device is opened, and in an order.
_GREP = f"""
target=$1 pattern=$2 glob=$3 regex=$4 flag=$5 most=$6 program=$7
if [ -d "$target" ]; then
    [ -r "$target" ] && [ -x "$target" ] && cd "$target" || exit {_CLOSED}
    start=.
elif [ -e "$target" ]; then
    [ -f "$target" ] && [ -r "$target" ] && cd "${{target%/*}}/" || exit {_CLOSED}
    start=./${{target##*/}}
else
    exit {_NOT_THERE}
fi
if [ -n "$program" ] && command -v "$program" >/dev/null; then
    try() {{ "$program" --no-config --color never $flag -e "$pattern" - </dev/null 2>&1; }}
    search() {{
        "$program" --no-config --color never --no-heading --with-filename --line-number --null --no-messages \
            --hidden --sort path --glob '!.git' ${{glob:+--glob "$glob"}} $flag -e "$pattern" -- "$start"
    }}
else
    {GNU_FIND} || exit {_NO_PROGRAM}
    try() {{ grep -E $flag -e "$pattern" </dev/null 2>&1; }}
    search() {{
        LC_ALL=C find "$start" -name .git -prune -o -type f -regextype posix-extended -regex "$regex" -print0 |
            LC_ALL=C sort -z |
            xargs -0 -r grep -EnIHZs $flag -e "$pattern" --
    }}
fi
error=$(try)
if [ $? -gt 1 ]; then
    printf '%s' "$error" | head -c 1000
    exit {_BAD_PATTERN}
fi
search 2>/dev/null | LC_ALL=C cut -b "-{_MAX_RAW_LINE_BYTES}" | head -n "$((most + 1))"
exit 0
"""


class Grep(CheckedTool):
    """Searches files; a sandbox without ripgrep is searched by grep (see this module's first lines)."""

    name = "grep"
    description = "Search the lines of files by a regular expression."
    parameters = with_optional(
        parameters(pattern=text("regular expression", max_length=1000)),
        path=text("folder or file to search; by default the repository"),
        glob=text("search only files that fit this glob pattern, such as *.py", max_length=1000)
        | {"pattern": "^[^!\\u0000][^\\u0000]*$"},
        case_insensitive=boolean("ignore upper and lower case"),
        max_results=integer("how many lines to show"),
    )

    def __init__(
        self,
        max_results: int = 100,
        timeout_s: float = GREP_TIMEOUT_S,
        program: str = "rg",
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose what a search may take.

        Args:
            max_results: lines that one call shows, if the model does not ask for fewer.
            timeout_s: wall time of one search.
            program: ripgrep's name or path in the sandbox; "": always use grep.
            name: see `CheckedTool`.
            description: see `CheckedTool`.
            strict: see `CheckedTool`.

        Raises:
            ValueError: a value is too small, or as of `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_results=max_results, timeout_s=timeout_s)
        self.max_results, self.timeout_s, self.program = max_results, timeout_s, program

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the lines that fit."""
        path, pattern = arguments.get("path", "."), arguments["pattern"]
        if "\n" in pattern:
            return refuse("pattern holds a line break, and lines are searched one by one")
        most = min(int(arguments.get("max_results", self.max_results)), self.max_results)
        glob = arguments.get("glob", "")
        regex = rf"\./({glob_to_regex(glob)})" if glob else ".*"
        target = path if path.startswith("/") else f"./{path}"
        flag = "-i" if arguments.get("case_insensitive", False) else ""
        words = [target, pattern, glob, regex, flag, str(most), self.program]
        result = await sandbox.exec(["sh", "-c", _GREP, "sh", *words], timeout_s=self.timeout_s)
        if result.timed_out:
            return refuse(f"searching {path} took longer than {self.timeout_s:g} s: name a smaller folder or a glob")
        if result.exit_code == _BAD_PATTERN:
            return refuse(f"pattern: {result.output.decode(errors='replace').strip()}")
        if result.exit_code == _CLOSED:
            return refuse(f"no permission to search {path}")
        if result.exit_code == _NOT_THERE:
            return refuse(f"no such file or folder: {path}")
        if result.exit_code == _NO_PROGRAM:
            return refuse("searching needs ripgrep, or GNU find and grep, which do not run here")
        if result.exit_code != 0:
            return refuse(f"searching {path} failed: {last_words(result)}")
        lines = before_the_cut(result).split(b"\n")[:-1]
        more = ["... and more"] if len(lines) > most or result.truncated else []
        return ToolResult("\n".join([*_shown(lines)[:most], *more]) or "(no matches)")


def _shown(lines: Iterable[bytes]) -> list[str]:
    """`path NUL number : text` as `path:number:text`; what has no NUL is the beginning of a path with a line break."""
    shown, beginning = [], b""
    for line in lines:
        name, nul, rest = line.partition(b"\0")
        if not nul:
            beginning += line + b"\n"
            continue
        number, _, found = rest.partition(b":")
        content = found.decode(errors="replace").removesuffix("\r")
        if len(content) > _MAX_LINE_CHARACTERS:
            content = f"{content[:_MAX_LINE_CHARACTERS]}..."
        shown.append(f"{show_name((beginning + name).removeprefix(b'./'))}:{number.decode(errors='replace')}:{content}")
        beginning = b""
    return shown
