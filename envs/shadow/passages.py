"""Texts cut into passages of lines, which are what is ranked and shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from envs.shadow.bm25 import Bm25
from envs.shadow.words import words

PASSAGE_LINES, STEP_LINES = 40, 30
"""Neighbours share ten lines, so that what is cut at the end of one is whole in the next."""
SHOWN_LINES = 10
_MAX_LINE = 300
_RANKED = 8
"""Passages to look at for every result, since some overlap with better ones."""


@dataclass(frozen=True)
class Passage:
    """Lines of a text: where they are."""

    name: str
    start: int
    """Number of the first line, from 1."""
    end: int
    """Of the last."""


@dataclass(frozen=True)
class Hit:
    """A passage that fits a query, and its lines that fit best."""

    name: str
    start: int
    end: int
    score: float
    text: str


class PassageIndex:
    """Texts by name, searched by passages. Not for use by several threads at a time."""

    def __init__(self) -> None:
        """Nothing is in it."""
        self._texts: dict[str, list[str]] = {}
        self._passages: dict[str, list[Passage]] = {}
        self._ranking: Bm25[Passage] = Bm25()
        self.num_characters = 0

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self._texts)

    @property
    def num_passages(self) -> int:
        """How many passages they have."""
        return len(self._ranking)

    def put(self, name: str, text: str) -> None:
        """Take in a text; the words of its name count in each of its passages."""
        self.remove(name)
        lines = text.removesuffix("\n").split("\n")
        self._texts[name], self._passages[name] = lines, []
        self.num_characters += sum(map(len, lines))
        for passage in _cut(name, len(lines)):
            self._passages[name].append(passage)
            body = "\n".join(lines[passage.start - 1 : passage.end])
            self._ranking.add(passage, (*words(name), *_words_of(body)))

    def remove(self, name: str) -> None:
        """Let go of a text, if it is there."""
        for passage in self._passages.pop(name, ()):
            self._ranking.remove(passage)
        self.num_characters -= sum(map(len, self._texts.pop(name, ())))

    def search(self, query: str, most: int, under: str = "", one_each: bool = False) -> list[Hit]:
        """The passages that fit best; none overlaps with a better one.

        Args:
            query: in words.
            most: how many to return.
            under: only texts whose name is this or lies in this folder; "": all.
            one_each: at most one passage of a text.
        """
        wanted = list(words(query))
        folder = under.strip("/")
        everything = self.num_passages if folder or one_each else _RANKED * most
        hits: list[Hit] = []
        taken: dict[str, list[Passage]] = {}
        for passage, score in self._ranking.search(wanted, everything):
            if folder and passage.name != folder and not passage.name.startswith(f"{folder}/"):
                continue
            others = taken.setdefault(passage.name, [])
            if others and (one_each or any(p.start <= passage.end and passage.start <= p.end for p in others)):
                continue
            others.append(passage)
            hits.append(self._hit(passage, score, wanted))
            if len(hits) == most:
                break
        return hits

    def _hit(self, passage: Passage, score: float, wanted: list[str]) -> Hit:
        """The lines of a passage around the one that says most of what was asked for."""
        lines = self._texts[passage.name][passage.start - 1 : passage.end]
        weights = {word: self._ranking.idf(word) for word in wanted}
        values = [sum(weights.get(word, 0.0) for word in set(words(line))) for line in lines]
        best = max(range(len(values)), key=lambda i: values[i], default=0)
        first = max(0, min(best - SHOWN_LINES // 3, len(lines) - SHOWN_LINES))
        shown = [line[:_MAX_LINE] for line in lines[first : first + SHOWN_LINES]]
        start = passage.start + first
        return Hit(passage.name, start, start + max(len(shown), 1) - 1, round(score, 4), "\n".join(shown))


@lru_cache(maxsize=10_000)
def _words_of(body: str) -> tuple[str, ...]:
    """Remembered, since the episodes of a group start from the same files."""
    return tuple(words(body))


def _cut(name: str, num_lines: int) -> Iterator[Passage]:
    """Passages of a text; the last one is not cut off a few lines before the end."""
    start = 1
    while start + PASSAGE_LINES <= num_lines:
        yield Passage(name, start, start + PASSAGE_LINES - 1)
        start += STEP_LINES
    yield Passage(name, start, max(num_lines, start))
