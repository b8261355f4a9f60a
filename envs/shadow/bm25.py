"""Okapi BM25 over an inverted index whose documents come and go.

Score of a document D for the words q of a query (Robertson and Zaragoza, 2009; the idf is Lucene's, always above 0):

    sum over q of  ln(1 + (N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * |D| / average |D|))

with N documents, n of them with q, and q f times in D.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Bm25(Generic[K]):
    """Documents by key, ranked for a query.

    Example:
        >>> index = Bm25()
        >>> index.add("a", ["read", "file"]), index.add("b", ["read", "line"])
        (None, None)
        >>> [key for key, score in index.search(["file"], 10)]
        ['a']
    """

    def __init__(self, k1: float = 1.2, b: float = 0.75) -> None:
        """`k1`: how much it counts that a word comes again; `b`: how much long documents lose."""
        self.k1, self.b = k1, b
        self._postings: dict[str, dict[K, int]] = {}
        self._lengths: dict[K, int] = {}
        self._words: dict[K, tuple[str, ...]] = {}
        self._order: dict[K, int] = {}
        self._total, self._num_added = 0, 0

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self._lengths)

    def add(self, key: K, words: Iterable[str]) -> None:
        """Take in a document; one with the same key goes."""
        self.remove(key)
        counts = Counter(words)
        for word, count in counts.items():
            self._postings.setdefault(word, {})[key] = count
        self._words[key] = tuple(counts)
        self._lengths[key] = counts.total()
        self._total += self._lengths[key]
        self._order[key] = self._num_added
        self._num_added += 1

    def remove(self, key: K) -> None:
        """Let go of a document, if it is there."""
        if key not in self._lengths:
            return
        for word in self._words.pop(key):
            postings = self._postings[word]
            del postings[key]
            if not postings:
                del self._postings[word]
        self._total -= self._lengths.pop(key)
        del self._order[key]

    def idf(self, word: str) -> float:
        """How telling a word is; 0 if no document has it."""
        if not (n := len(self._postings.get(word, ()))):
            return 0.0
        return math.log(1 + (len(self._lengths) - n + 0.5) / (n + 0.5))

    def search(self, query: Iterable[str], most: int) -> list[tuple[K, float]]:
        """The documents with the highest scores, best first; of equal ones the one that was added first.

        A word that the query repeats counts once; documents without any of its words are left out.
        """
        if not self._lengths:
            return []
        scores: dict[K, float] = {}
        average = self._total / len(self._lengths)
        for word in dict.fromkeys(query):
            idf = self.idf(word)
            for key, count in self._postings.get(word, {}).items():
                length = 1 - self.b + self.b * self._lengths[key] / average
                scores[key] = scores.get(key, 0.0) + idf * count * (self.k1 + 1) / (count + self.k1 * length)
        return heapq.nsmallest(most, scores.items(), key=lambda item: (-item[1], self._order[item[0]]))
