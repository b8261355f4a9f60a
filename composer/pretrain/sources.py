"""Documents of a mix's sources: the standard library's code, its prose, text files, JSON lines.

A document is known by its size and where it lies before anything of it is read. It is handed out in pieces that end at
line ends, so that one long file does not fill a whole batch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from composer.errors import CorpusError
from composer.schema import SourceConfig, SourceKind

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_TOPICS = "pydoc_data/topics.py"
"""The language reference that `help()` shows: a dictionary of texts."""


@dataclass(frozen=True)
class Piece:
    """A part of a document."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Document:
    """One text of a source."""

    name: str
    """Unique in its source and the same on every machine."""
    origin: str
    """Where it comes from; sources that share an origin share its text."""
    num_pieces: int
    read: Callable[[int], Piece]
    """A piece by its number."""


def held_out(name: str, share: float) -> bool:
    """Whether a document belongs to the held-out codebase: decided by its name alone, on any machine, for any seed."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def open_source(key: str, source: SourceConfig, piece_bytes: int) -> list[Document]:
    """List a source's documents, sorted by name.

    Args:
        key: the source's place in the config, for messages.
        source: what to open.
        piece_bytes: about how long a piece of a file is.

    Raises:
        CorpusError: `path` is missing, is not there, or holds no documents.
    """
    match source.kind:
        case SourceKind.stdlib_code:
            documents = [_file(p, name, piece_bytes) for name, p in _stdlib_modules()]
        case SourceKind.stdlib_prose:
            documents = [d for name, p in _stdlib_modules() for d in _prose(p, name)]
        case SourceKind.files:
            root = _existing(key, source.path, "a folder of text files")
            if not source.pattern or source.pattern.startswith("/") or ".." in Path(source.pattern).parts:
                raise CorpusError(f"{key}.pattern={source.pattern!r}: give a pattern below the path, such as '**/*.py'")
            found = sorted(p for p in root.glob(source.pattern) if p.is_file() and p.stat().st_size)
            documents = [_file(p, p.relative_to(root).as_posix(), piece_bytes) for p in found]
        case SourceKind.jsonl:
            documents = _json_lines(key, _existing(key, source.path, "a file of JSON lines"), source.text_field)
        case SourceKind.sessions:
            raise CorpusError(f"{key}.kind='sessions': only phases of kind sft have sessions; use another kind")
    if not documents:
        what = f"path={source.path!r}" if source.path else f"kind={source.kind.value!r}"
        raise CorpusError(f"{key}.{what}: no documents match pattern={source.pattern!r}; correct path or pattern")
    return documents


def _existing(key: str, path: str | None, what: str) -> Path:
    if not path:
        raise CorpusError(f"{key}.path={path!r}: give {what}")
    found = Path(path).expanduser()
    if not found.exists():
        raise CorpusError(f"{key}.path={path!r}: there is no such path; give {what}")
    return found.resolve()


@functools.cache
def _stdlib_modules() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in root.rglob("*.py") if not _NOT_STDLIB & set(p.relative_to(root).parts) and p.stat().st_size]
    return sorted((p.relative_to(root).as_posix(), p.resolve()) for p in found)


def _file(path: Path, name: str, piece_bytes: int) -> Document:
    num_pieces = -(-path.stat().st_size // piece_bytes)

    def read(number: int) -> Piece:
        with path.open("rb") as file:
            start = _line_start(file, number * piece_bytes)
            end = _line_start(file, (number + 1) * piece_bytes)
            file.seek(start)
            data = file.read(end - start)
        return Piece(data.decode(errors="replace"), number == num_pieces - 1)

    return Document(name, str(path), num_pieces, read)


def _line_start(file, offset: int) -> int:  # noqa: ANN001
    """The first line start at or after `offset`, so that neighbouring pieces meet there."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline()
    return file.tell()


def _prose(path: Path, name: str) -> Iterator[Document]:
    """The docstrings of a module are one document; each topic of the language reference is one."""
    if name == _TOPICS:
        for topic in sorted(_topics(path)):
            yield Document(f"{name}:{topic}", str(path), 1, lambda _, t=topic: Piece(_topics(path)[t], True))
    else:
        yield Document(name, str(path), 1, lambda _: Piece(docstrings(path.read_text(errors="replace")), True))


@functools.cache
def _topics(path: Path) -> dict[str, str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            return ast.literal_eval(node.value)
    return {}


def docstrings(source: str) -> str:
    r"""The docstrings of a module, its classes and functions in order, each under its name; empty if it has none.

    Example:
        >>> docstrings('def area(r):\n    "Return the area."')
        'area\n\nReturn the area.\n'
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            title = "" if isinstance(node, ast.Module) else f"{node.name}\n\n"
            texts.append(f"{title}{text}\n")
    return "\n".join(texts)


def _json_lines(key: str, path: Path, text_field: str) -> list[Document]:
    if not path.is_file():
        raise CorpusError(f"{key}.path={str(path)!r}: it is a folder; give a file of JSON lines")
    offsets = [0]
    with path.open("rb") as file:
        for line in file:
            offsets.append(offsets[-1] + len(line))

    def read(_: int, number: int) -> Piece:
        with path.open("rb") as file:
            file.seek(offsets[number])
            line = file.readline()
        try:
            text = json.loads(line)[text_field]
            if not isinstance(text, str):
                raise TypeError(f"it holds a {type(text).__name__}")
            return Piece(text, True)
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{key}.path={str(path)!r}: line {number + 1} is not a JSON object with the key "
                f"{text_field!r}; correct the line or {key}.text_field"
            ) from error

    return [
        Document(str(n), f"{path}:{n}", 1, functools.partial(read, number=n))
        for n in range(len(offsets) - 1)
        if offsets[n + 1] - offsets[n] > 1
    ]
