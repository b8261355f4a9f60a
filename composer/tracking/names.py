"""Make names and values fit what MLflow accepts. Pure: no I/O, no MLflow.

The limits are those of mlflow 3.17 (`mlflow.utils.validation`): names of at most 250 characters out of letters, digits,
`_ - . : /` and space that are a normal relative path; parameter values of at most 6,000 and tag values of at most
8,000 characters; at most 100 parameters or 1,000 metrics, and 1 MB, in one request.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

MAX_NAME = 250
MAX_PARAM_VALUE = 6000
MAX_TAG_VALUE = 8000
MAX_PARAMS_PER_REQUEST = 100
MAX_METRICS_PER_REQUEST = 1000
MAX_REQUEST_BYTES = 900_000

_FORBIDDEN = re.compile(r"[^/\w.\- :]+", re.ASCII)
_WORDS = {"@": "_at_", "%": "_percent"}
_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]+)(.*)", re.DOTALL)
"""As SQLAlchemy reads it: the path, in which it decodes `%`, ends at the first question mark."""

T = TypeVar("T")


def clean_name(name: str) -> str:
    """A name that MLflow accepts and that a person still recognises.

    Args:
        name: any text.

    Returns:
        1 to 250 characters; unchanged if the name was acceptable. One that had to be cut ends in a hash of the whole.

    Example:
        >>> clean_name("mean@1"), clean_name("timing(s)/gen"), clean_name("/a//../b ")
        ('mean_at_1', 'timing_s/gen', 'a/b')
    """
    for sign, word in _WORDS.items():
        name = name.replace(sign, word)
    parts = []
    for part in name.split("/"):
        cleaned = _FORBIDDEN.sub("_", part)
        if cleaned != part:
            cleaned = cleaned.strip("_")
        cleaned = cleaned.strip()
        if cleaned not in ("", ".", ".."):
            parts.append(cleaned)
    cleaned = "/".join(parts) or "unnamed"
    if len(cleaned) > MAX_NAME:
        cleaned = f"{cleaned[: MAX_NAME - 9]}-{_digest(cleaned)}"
    return cleaned


class Names:
    """Cleans the names of one run and keeps two names apart that would become one.

    Example:
        >>> names = Names()
        >>> names("a@b"), names("a_at_b") != "a_at_b", names("a@b")
        ('a_at_b', True, 'a_at_b')
    """

    def __init__(self) -> None:
        """Start with no names taken."""
        self._cleaned: dict[str, str] = {}
        self._taken: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The cleaned name; always the same for the same `name`."""
        if name not in self._cleaned:
            cleaned = clean_name(name)
            if self._taken.setdefault(cleaned, name) != name:
                cleaned = f"{cleaned[: MAX_NAME - 9]}-{_digest(name)}"
                self._taken[cleaned] = name
            self._cleaned[name] = cleaned
        return self._cleaned[name]


def flatten(value: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested mappings as one level: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    A list that holds mappings is numbered (`a.0.b`); any other list stays a value. Empty mappings vanish.
    """
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    else:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, item in items:
        name = getattr(key, "value", key) if isinstance(key, Enum) else key
        flat.update(flatten(item, f"{prefix}{separator}{name}" if prefix else str(name), separator))
    return flat


def value_text(value: Any) -> str:
    """A config value in the spelling of YAML, so that a parameter can be pasted as an override."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (bool, list, tuple)):
        return json.dumps(value, default=lambda item: getattr(item, "value", str(item)))
    return str(value)


def numbers(value: Any, separator: str = "/") -> dict[str, float]:
    """The finite and non-finite numbers of a nested result, flattened; texts, lists and nulls are left out."""
    return {
        name: float(number)
        for name, number in flatten(value, separator=separator).items()
        if isinstance(number, (int, float)) and not isinstance(number, bool)
    }


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; a cut text says so at its end."""
    if len(text) <= limit:
        return text
    note = f"... [{len(text)} characters]"
    return text[: limit - len(note)] + note


def finite_or_nan(number: float) -> float:
    """MLflow stores infinity as the largest float, which ruins every chart: record it as NaN instead."""
    return number if math.isfinite(number) else math.nan


def chunks(
    items: Iterable[T], max_items: int, size: Any = None, max_bytes: int = MAX_REQUEST_BYTES
) -> Iterator[list[T]]:
    """Split into lists of at most `max_items` items and, if `size` (item -> bytes) is given, at most `max_bytes`."""
    chunk: list[T] = []
    used = 0
    for item in items:
        item_bytes = size(item) if size else 0
        if chunk and (len(chunk) >= max_items or used + item_bytes > max_bytes):
            yield chunk
            chunk, used = [], 0
        chunk.append(item)
        used += item_bytes
    if chunk:
        yield chunk


def redact(text: str) -> str:
    """A URI without its password; any other text unchanged."""
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
        if not parts.password:
            return text
        return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))
    except ValueError:
        return text


def sqlite_uri(database: Path) -> str:
    """The SQLite URI of a file. Whatever has a meaning in a URI is encoded; the rest stays readable.

    Example:
        >>> sqlite_uri(Path("/my runs/mlflow.db")), sqlite_uri(Path("50%?.db"))
        ('sqlite:////my runs/mlflow.db', 'sqlite+pysqlite:///50%25%3F.db')
    """
    encoded = _encoded(database)
    # Of a URI without driver, MLflow makes the folder as well (`_make_parent_dirs_if_sqlite`), but does not decode it.
    return f"sqlite{'' if encoded == str(database) else '+pysqlite'}:///{encoded}"


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite URI; None for any other."""
    found = _SQLITE.fullmatch(uri)
    return Path(unquote(found[2])) if found else None


def anchored_uri(uri: str, base: Path) -> str:
    """An SQLite URI with an absolute path, so that it names the same file from any folder; any other unchanged.

    Args:
        uri: of a tracking server or database.
        base: what a relative path is relative to; absolute.
    """
    found = _SQLITE.fullmatch(uri)
    if found is None or found[2].startswith("/"):
        return uri
    anchored = sqlite_uri(base / Path(unquote(found[2])).expanduser())
    return (anchored if found[1] == "sqlite:///" else found[1] + anchored.partition(":///")[2]) + found[3]


def _encoded(path: Path) -> str:
    return re.sub("[%?#]", lambda sign: quote(sign[0]), str(path))


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:8]
