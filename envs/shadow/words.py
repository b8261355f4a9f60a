"""Words of code and of what people ask about it, so that "where are files parsed" finds `parseFile`.

Identifiers are split where their case changes and at underscores; English endings are cut, roughly: two words that
differ by them should meet, and it does no harm if two others do as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import lru_cache

_IDENTIFIER = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
"""HTTPServer2 -> HTTP, Server, 2. Case is looked at in ASCII only."""
_VOWEL = re.compile("[aeiouy]")
_MAX_WORD = 64


def words(text: str) -> Iterator[str]:
    """The words of a text in order: every part of an identifier, and the whole of one that has several.

    Example:
        >>> list(words("def parseFiles(file_name): ..."))
        ['def', 'pars', 'fil', 'parsefiles', 'fil', 'nam', 'file_name']
    """
    for match in _IDENTIFIER.finditer(text):
        yield from _words_of(match[0][:_MAX_WORD])


@lru_cache(maxsize=100_000)
def _words_of(identifier: str) -> tuple[str, ...]:
    """Remembered, since identifiers come again and again."""
    parts = _PART.findall(identifier)
    whole = [identifier.lower()] if len(parts) > 1 else []
    return tuple(sys.intern(word) for word in (*(stem(part.lower()) for part in parts), *whole))


def stem(word: str) -> str:
    """A lower-case word without its English ending.

    Example:
        >>> [stem(w) for w in ("queries", "classes", "parsed", "running", "cache", "status", "use")]
        ['query', 'class', 'pars', 'run', 'cach', 'status', 'use']
    """
    if not word.isascii() or len(word) < 4:
        return word
    if word.endswith("ies") and len(word) > 4:
        word = f"{word[:-3]}y"
    elif word.endswith(("sses", "shes", "ches", "xes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        rest = word.removesuffix(ending)
        if rest != word and len(rest) > 2 and _VOWEL.search(rest):
            word = rest[:-1] if rest[-1] == rest[-2] and rest[-1] not in "lsz" else rest
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word
