"""Shell command lines as simple commands, and the paths that tool calls name. Reads, never runs; never fails.

It is no shell: what it cannot take apart (an unclosed quote) it takes word by word. A rule that looks for a program and
its arguments is not fooled by `cd x && sudo env A=1 bash -c '...'`, and sees what pipes, lists and here-documents hold.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from composer.types import ToolCall

COMMAND_KEYS = frozenset({"command", "cmd", "commands", "script", "keystrokes", "bash", "argv", "command_line"})
"""Arguments of tools that are shell command lines."""
PATH_KEYS = frozenset(
    {
        *(
            "path",
            "file",
            "file_path",
            "filename",
            "filepath",
            "target_file",
            "absolute_path",
            "relative_path",
            "paths",
        ),
        *("folder", "dir", "dir_path", "directory", "target_directory", "relative_workspace_path", "uri"),
    }
)
"""Arguments of tools that are paths."""
READERS = frozenset(
    {
        *("cat", "tac", "nl", "head", "tail", "less", "more", "bat", "strings", "xxd", "od", "hexdump", "base64", "jq"),
        *("grep", "egrep", "fgrep", "rg", "ag", "zgrep", "zcat", "sed", "awk", "gawk", "cut", "sort", "diff", "cmp"),
        *(
            "vi",
            "vim",
            "nano",
            "view",
            "sqlite3",
            "cp",
            "mv",
            "tar",
            "unzip",
            "python",
            "python3",
            "node",
            "perl",
            "ruby",
        ),
    }
)
"""Programs that show, or take away, what a file holds."""
_WRAPPERS = frozenset(
    {"sudo", "env", "nohup", "time", "command", "exec", "builtin", "stdbuf", "nice", "setsid", "doas"}
)
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ash", "ksh"})
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "for", "{", "}", "!", "case"}
)
_SEPARATORS = frozenset({";", "&&", "||", "|", "&", "|&", ";;", "(", ")", "\n"})
_REDIRECT = re.compile(r"(\d*)(>>?|<|<>|>\||&>>?)(&\d)?$")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:\n\s*\2(?=\s|$)|\Z)", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VERSIONED = re.compile(r"^(python|pypy|pip|node|ruby|perl)[\d.]+$")
_MAX_DEPTH = 4
_MAX_CHARACTERS = 100_000


@dataclass(frozen=True)
class Command:
    """One simple command: a program, its arguments, and what it is given to read as code."""

    words: tuple[str, ...]
    line: str
    """The command line that it is part of."""
    code: str = ""
    """Of an interpreter: what stands after -c or -e, or in its here-document."""
    writes: tuple[str, ...] = ()
    """Files that its output goes to."""
    background: bool = False

    @property
    def program(self) -> str:
        """Its name, without a folder and a version: `python3.11` is `python`."""
        name = PurePosixPath(self.words[0]).name if self.words else ""
        return _VERSIONED.sub(r"\1", name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after the program."""
        return self.words[1:]

    @property
    def operands(self) -> tuple[str, ...]:
        """Its arguments but for options."""
        return tuple(word for word in self.arguments if not word.startswith("-"))

    @property
    def reads(self) -> bool:
        """Whether it shows what a file holds: a program that does, or a `find` that runs one."""
        if self.program == "find":
            return any(PurePosixPath(word).name in READERS for word in self.arguments)
        return self.program in READERS or self.program in {"python", "pip"}


def commands_of(call: ToolCall) -> list[Command]:
    """The simple commands of a tool call, in order; none if the tool takes no command line."""
    found: list[Command] = []
    for key, value in call.arguments.items():
        if key.lower() not in COMMAND_KEYS:
            continue
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = shlex.join(value) if key.lower() in ("argv", "command", "cmd") else "\n".join(value)
        if isinstance(value, str):
            found += parse(value)
    return found


def paths_of(call: ToolCall) -> list[str]:
    """The paths that a tool call names as such."""
    found = []
    for key, value in call.arguments.items():
        if key.lower() in PATH_KEYS:
            found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
    return found


def parse(line: str) -> list[Command]:
    """The simple commands of a command line; those in strings that shells are given, too."""
    return list(_parse(line[:_MAX_CHARACTERS], line[:_MAX_CHARACTERS], 0))


def _parse(text: str, line: str, depth: int) -> Iterator[Command]:
    documents: list[str] = []

    def take(match: re.Match[str]) -> str:
        documents.append(match[4])
        return f" <<{len(documents) - 1} {match[3]}\n"

    text = _HEREDOC.sub(take, text).replace("\\\n", " ")
    text = re.sub(r"\$\(([^()]*)\)|`([^`]*)`", lambda m: f" ; {m[1] or m[2]} ; ", text) if "<<" not in text else text
    words: list[str] = []
    for word in (*_split(text), "\n"):
        if word in _SEPARATORS:
            yield from _command(words, line, documents, word == "&", depth)
            words = []
        else:
            words.append(word)


def _split(text: str) -> list[str]:
    text = re.sub(r"\d*>&(?:\d|-)", " ", text).replace("&>", ">")  # else the & would end the command
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        words = list(lexer)
    except ValueError:  # an unclosed quote
        words = re.findall(r"&&|\|\||[;|&\n()]|[^\s;|&()]+", text)
    # A run of newlines and other separators is one token.
    return [w for word in words for w in (re.findall(r"&&|\|\||[;|&\n()]", word) if _is_run(word) else [word])]


def _is_run(word: str) -> bool:
    return bool(word) and not word.strip("();|&\n")


def _command(words: list[str], line: str, documents: list[str], background: bool, depth: int) -> Iterator[Command]:
    words, code, writes = list(words), "", []
    kept: list[str] = []
    skip = False
    for i, word in enumerate(words):
        if skip:
            skip = False
        elif match := re.fullmatch(r"<<(\d+)", word):
            code = documents[int(match[1])] if int(match[1]) < len(documents) else ""
        elif match := _REDIRECT.fullmatch(word):
            if not match[3]:
                skip = True
                if ">" in match[2] and i + 1 < len(words):
                    writes.append(words[i + 1])
        elif match := re.match(r"(\d*|&)>>?(?!&)(.+)", word):
            writes.append(match[2])
        elif not re.match(r"\d*[<>]&?\d?", word):
            kept.append(word)
    words = _unwrapped(kept)
    if not words:
        return
    name = _VERSIONED.sub(r"\1", PurePosixPath(words[0]).name)
    for flag in ("-c", "-e", "-lc", "-ic", "--eval"):
        if flag in words[1:-1] and (name in _SHELLS or name in ("python", "node", "perl", "ruby")):
            code = words[words.index(flag) + 1]
            break
    if name in _SHELLS and code and depth < _MAX_DEPTH:
        yield from _parse(code, line, depth + 1)
        return
    if name == "eval" and depth < _MAX_DEPTH:
        yield from _parse(" ".join(words[1:]), line, depth + 1)
        return
    if name == "tee":
        writes += [word for word in words[1:] if not word.startswith("-")]
    yield Command(tuple(words), line, code, tuple(writes), background)
    if name == "xargs" and depth < _MAX_DEPTH:
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            rest = rest[2:] if rest[0] in ("-n", "-I", "-P", "-L", "-d") else rest[1:]
        if rest:
            yield from _command(rest, line, [], background, depth + 1)


def _unwrapped(words: list[str]) -> list[str]:
    """Without assignments, keywords, and programs that run the rest."""
    while words:
        name = PurePosixPath(words[0]).name
        if _ASSIGNMENT.match(words[0]) or words[0] in _KEYWORDS:
            words = words[1:]
        elif name in _WRAPPERS and len(words) > 1:
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[2:] if words[0] in ("-u", "-n", "-o") and len(words) > 2 else words[1:]
        elif name == "timeout" and len(words) > 2:
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[2:] if words[0] in ("-s", "-k") else words[1:]
            words = words[1:]
        else:
            break
    return words
