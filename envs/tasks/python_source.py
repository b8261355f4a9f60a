"""Python files as bytes and syntax tree at once, so that an edit leaves everything beside it as it was."""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
TEST_FOLDERS = frozenset({"test", "tests"})
NOT_LIBRARY = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py"})
NOT_LIBRARY_FOLDERS = frozenset({"doc", "docs", "examples", "benchmarks", "scripts", "build", "dist"})


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a file give way to others."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Definition:
    """A function, method or class that is not inside of a function."""

    name: str
    """With its classes: `Shelf.add`."""
    node: FunctionNode | ast.ClassDef
    top: str
    """The definition of the module that it is, or is in."""

    @property
    def is_public(self) -> bool:
        """Whether no part of its name begins with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))


class PythonSource:
    r"""One file that can be parsed and is UTF-8 without a mark at its beginning and with lines of the usual ends.

    Example:
        >>> source = PythonSource(b"def f(a):\n    return a  # same\n")
        >>> source.text(source.tree.body[0].body[0].value)
        b'a'
    """

    def __init__(self, content: bytes) -> None:
        """Parse it.

        Raises:
            SyntaxError, ValueError: it is no such file.
        """
        if content.startswith(b"\xef\xbb\xbf"):
            raise ValueError("it begins with a byte-order mark")
        if b"\r" in content.replace(b"\r\n", b""):
            raise ValueError("it has lines that end with a carriage return alone, which tools count differently")
        content.decode()
        self.content = content
        self.tree = ast.parse(content)
        self._lines = content.splitlines(keepends=True)
        # Of line n (from 1) at n - 1; ast counts columns in bytes of UTF-8.
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Where a statement or an expression is, in bytes; without its decorators."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0),
        )

    def text(self, node: ast.stmt | ast.expr) -> bytes:
        """The source of a statement or an expression."""
        start, end = self.span(node)
        return self.content[start:end]

    def whole_lines(self, node: FunctionNode | ast.ClassDef) -> tuple[int, int]:
        """The lines of a definition with its decorators and the blank lines before it, in bytes."""
        first = min(n.lineno for n in (node, *node.decorator_list)) - 1
        while first > 0 and not self._lines[first - 1].strip():
            first -= 1
        return self._starts[first], self._starts[node.end_lineno or node.lineno]

    def alone(self, node: FunctionNode, *edits: Edit) -> ast.Module:
        """A function's own syntax tree, after edits within its lines; quicker than that of the file.

        Raises:
            SyntaxError, ValueError: the edits leave no Python.
        """
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        lines = PythonSource.replaced(
            self.content[start:end], *(Edit(e.start - start, e.end - start, e.text) for e in edits)
        )
        return ast.parse(b"if 1:\n" + lines if node.col_offset else lines)

    def tokens_between(self, start: int, end: int) -> list[tuple[int, int, str]]:
        """Operators and words that lie in a range of bytes: start, end and text of each."""
        first = bisect_left(self._tokens, (start, 0, ""))
        return [t for t in itertools.takewhile(lambda t: t[0] < end, self._tokens[first:]) if t[1] <= end]

    def definitions(self) -> Iterator[Definition]:
        """In the order of the file."""
        yield from _definitions(self.tree.body, "", "")

    def edited(self, *edits: Edit) -> bytes:
        """The file with edits that do not overlap."""
        return self.replaced(self.content, *edits)

    @staticmethod
    def replaced(content: bytes, *edits: Edit) -> bytes:
        """Any bytes with edits that do not overlap."""
        for edit in sorted(edits, key=lambda e: e.start, reverse=True):
            content = content[: edit.start] + edit.text + content[edit.end :]
        return content

    @cached_property
    def _tokens(self) -> list[tuple[int, int, str]]:
        found = []
        for token in tokenize.tokenize(io.BytesIO(self.content).readline):
            if token.type in (tokenize.OP, tokenize.NAME):
                # Columns of tokens count characters.
                start, end = (
                    self._starts[row - 1] + len(self._lines[row - 1].decode()[:column].encode())
                    for row, column in (token.start, token.end)
                )
                found.append((start, end, token.string))
        return found


def _definitions(body: Iterable[ast.stmt], prefix: str, top: str) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Definition(prefix + node.name, node, top or node.name)
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.", top or node.name)


def parse_files(files: Mapping[str, bytes], paths: Iterable[str]) -> dict[str, PythonSource]:
    """Those of the files that can be parsed."""
    found = {}
    for path in paths:
        try:
            found[path] = PythonSource(files[path])
        except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
            continue
    return found


def is_test_file(path: str) -> bool:
    """Whether a file belongs to a repository's tests: pytest would collect it, or it lies in their folder."""
    p = PurePosixPath(path)
    if not TEST_FOLDERS.isdisjoint(p.parts[:-1]) or p.name == "conftest.py":
        return True
    return p.suffix == ".py" and (p.stem.startswith("test_") or p.stem.endswith("_test"))


def is_library_file(path: str) -> bool:
    """Whether a file holds what a repository is for."""
    p = PurePosixPath(path)
    return (
        p.suffix == ".py"
        and not is_test_file(path)
        and p.name not in NOT_LIBRARY
        and NOT_LIBRARY_FOLDERS.isdisjoint(p.parts[:-1])
    )
