"""Documents of a mix's sources: the standard library's code, its prose, text files, JSON lines.

A document is known by its size and where it lies before it is read; of a file only the beginning is looked at, which
tells text from anything else. It is handed out in pieces that end at line ends, so that one long file does not fill a
whole batch.
"""

from __future__ import annotations

import ast
import codecs
import functools
import hashlib
import json
import logging
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from composer.errors import CorpusError
from composer.schema import SourceConfig, SourceKind

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_TOPICS = "pydoc_data/topics.py"
"""The language reference that `help()` shows: a dictionary of texts."""
_HEAD_BYTES = 8192
"""How much of a file tells whether it is text: as much as git looks at."""
log = logging.getLogger(__name__)


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
    reader: Callable[[int], Piece]
    """A piece by its number; an OSError becomes what `read` says."""

    def read(self, number: int) -> Piece:
        """A piece by its number.

        Raises:
            CorpusError: it is no longer there or cannot be read, or a line is not what the source promises.
        """
        try:
            return self.reader(number)
        except OSError as error:
            raise CorpusError(
                f"{self.origin}: was there at the start and cannot be read now ({error.strerror}): give it back and "
                "resume, or start a new run; sources must stay as they are while a run lasts"
            ) from None


def held_out(name: str, share: float) -> bool:
    """Whether a document belongs to the held-out codebase: decided by its name alone, on any machine, for any seed."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def open_source(
    key: str, source: SourceConfig, piece_bytes: int, warn: Callable[[str], None] = log.warning
) -> list[Document]:
    """List a source's documents, sorted by name.

    Args:
        key: the source's place in the config, for messages.
        source: what to open.
        piece_bytes: about how long a piece of a file is.
        warn: is told in one sentence of what is left out.

    Raises:
        CorpusError: `path` is missing, is not there or cannot be read, or it holds no documents.
    """
    match source.kind:
        case SourceKind.stdlib_code:
            documents = [_file(p, name, piece_bytes) for name, p in _stdlib_modules()]
        case SourceKind.stdlib_prose:
            documents = [d for name, p in _stdlib_modules() for d in _prose(p, name)]
        case SourceKind.files:
            root = _existing(key, source.path, "a folder of text files", Path.is_dir)
            found = _text_files(key, root, source.pattern, warn)
            documents = [_file(p, p.relative_to(root).as_posix(), piece_bytes) for p in found]
        case SourceKind.jsonl:
            path = _existing(key, source.path, "a file of JSON lines", Path.is_file)
            documents = _json_lines(key, path, source.text_field)
        case SourceKind.sessions:
            raise CorpusError(f"{key}.kind='sessions': only phases of kind sft have sessions; use another kind")
    if not documents:
        raise CorpusError(f"{key}.kind={source.kind.value!r}: this Python has no standard library as text; use files")
    return documents


def _existing(key: str, path: str | None, what: str, is_what: Callable[[Path], bool]) -> Path:
    if not path:
        raise CorpusError(f"{key}.path={path!r}: give {what}")
    found = Path(path).expanduser()
    if not is_what(found):
        wrong = f"is not {what}" if found.exists() else "is not there"
        raise CorpusError(f"{key}.path={path!r} {wrong}: correct {key}.path, which names {what}")
    return found.resolve()


def _text_files(key: str, root: Path, pattern: str, warn: Callable[[str], None]) -> list[Path]:
    """The files below `root` that match and are text."""
    try:
        found = sorted(p for p in root.glob(pattern) if p.is_file() and p.stat().st_size)
        texts = [p for p in found if _is_text(p)]
    except OSError as error:
        raise CorpusError(
            f"{key}.pattern={pattern!r}: {error.filename} cannot be read ({error.strerror}): make it readable, or give "
            "a pattern that leaves it out"
        ) from None
    binary = set(found).difference(texts)
    example = f"such as {min(binary).relative_to(root)}" if binary else ""
    if not texts:
        what = f"all {len(found)} files are binary or not in UTF-8, {example}" if found else "no files with content"
        raise CorpusError(f"{key}.path={str(root)!r}: {what} match pattern={pattern!r}; correct path or pattern")
    if binary:
        warn(
            f"{key}.pattern={pattern!r}: {len(binary)} of {len(found)} files are binary or not in UTF-8 and are left "
            f"out, {example}"
        )
    return texts


def _is_text(path: Path) -> bool:
    """Whether a file begins with UTF-8 that has no NUL: programs, pictures, archives and UTF-16 do not."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False


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
    offsets = []
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file):
                if line.strip():
                    offsets.append((number, offset))
                offset += len(line)
    except OSError as error:
        raise CorpusError(f"{key}.path={str(path)!r}: cannot be read ({error.strerror}): make it readable") from None

    def read(_: int, number: int, offset: int) -> Piece:
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            text = json.loads(line)[text_field]
            if not isinstance(text, str):
                raise TypeError(f"it holds a {type(text).__name__}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorpusError(
                f"{key}.path={str(path)!r}: line {number + 1} is not a JSON object with the key "
                f"{text_field!r} and a text; correct the line or {key}.text_field"
            ) from error
        return Piece(text.encode(errors="replace").decode(), True)  # half a surrogate pair is valid in JSON only

    documents = [Document(str(n), f"{path}:{n}", 1, functools.partial(read, number=n, offset=o)) for n, o in offsets]
    if not documents:
        raise CorpusError(f"{key}.path={str(path)!r}: holds no lines; give {key}.path of a file of JSON lines")
    documents[0].read(0)  # a wrong text_field shows at the first line, before anything is started
    return documents
