"""The weighted mix of sources: which text is read next, and the held-out codebase that is never read.

The next piece always comes from the source that is furthest behind its share of tokens, and in a source pieces come in
an order shuffled anew in each epoch. Both follow from the seed and a few counters, so that a mix resumes exactly.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from composer.errors import CorpusError
from composer.pretrain.sources import Document, Piece, held_out, open_source
from composer.schema import Config, MixConfig, PhaseKind, SourceConfig, Stage

_BYTES_PER_TOKEN = 4
"""About what a large tokenizer makes of code; only decides how long pieces are."""
log = logging.getLogger(__name__)


CODEBASE_PIECE_BYTES = 2048
"""How long the codebase's pieces are: the same in all phases, so that their losses are of the same text."""


def piece_bytes(seq_len: int) -> int:
    """How long pieces are for rows of `seq_len` tokens."""
    return seq_len * _BYTES_PER_TOKEN


class Codebase:
    """The held-out documents of a mix."""

    def __init__(self, mix: MixConfig, warn: Callable[[str], None] = log.warning) -> None:
        """Choose them; `warn` is told what is left out.

        Raises:
            CorpusError: the source cannot be opened, or the share is so small that no document is held out.
        """
        documents = open_source("mix.codebase", mix.codebase, CODEBASE_PIECE_BYTES, warn)
        self.documents = [d for d in documents if held_out(d.name, mix.codebase_share)]
        if not self.documents:
            raise CorpusError(
                f"mix.codebase_share={mix.codebase_share}: none of {len(documents)} documents is held out; raise it"
            )
        self.origins = frozenset(d.origin for d in self.documents)

    def pieces(self) -> Iterator[Piece]:
        """All held-out pieces, in an order that is the same in every run."""
        places = [(d, n) for d in self.documents for n in range(d.num_pieces)]
        random.Random("codebase").shuffle(places)
        for document, number in places:
            yield document.read(number)


@dataclass
class _Cursor:
    """Where a source stands."""

    epoch: int = 0
    index: int = 0
    offset: int = 0
    """Characters of the place at `index` that are read already."""
    tokens: int = 0


class Mix:
    """An endless stream of pieces.

    The reader reports through `count` how many tokens each piece became; shares are shares of tokens.
    """

    def __init__(
        self,
        key: str,
        sources: dict[str, SourceConfig],
        codebase: Codebase,
        seq_len: int,
        seed: int,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """Open the sources.

        Args:
            key: their place in the config, for messages, such as `mix.phases.base.sources`.
            sources: name -> source.
            codebase: what must not be read.
            seq_len: tokens of a row.
            seed: of the order.
            warn: is told what is left out.

        Raises:
            CorpusError: a source cannot be opened, or nothing of it is left beside the codebase.
        """
        self._key, self._sources, self._seed = key, sources, seed
        self._places: dict[str, list[tuple[Document, int]]] = {}
        for name, source in sources.items():
            documents = [
                d
                for d in open_source(f"{key}.{name}", source, piece_bytes(seq_len), warn)
                if d.origin not in codebase.origins
            ]
            if not documents:
                raise CorpusError(
                    f"{key}.{name}: all of its documents are held out as the codebase; lower "
                    "mix.codebase_share or give another source"
                )
            self._places[name] = [(d, n) for d in documents for n in range(d.num_pieces)]
        self._cursors = {name: _Cursor() for name in sources}
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._texts: dict[str, tuple[int, Piece]] = {}
        self._longest = 2 * piece_bytes(seq_len)  # texts that are not files come whole, however long they are

    def next(self) -> tuple[str, Piece]:
        """The name of the next source and its next piece."""
        name = min(self._sources, key=lambda n: self._cursors[n].tokens / self._sources[n].weight)
        cursor, places = self._cursors[name], self._places[name]
        for _ in range(len(places) + 1):  # some modules have no docstrings: go on, at most once around
            whole = self._read(name, self._order(name)[cursor.index])
            end = whole.text.find("\n", cursor.offset + self._longest) + 1
            piece = Piece(whole.text[cursor.offset : end or None], whole.ends_document and not end)
            cursor.offset = end
            if not end:
                cursor.index += 1
                if cursor.index == len(places):
                    cursor.index, cursor.epoch = 0, cursor.epoch + 1
            if piece.text.strip():
                return name, piece
        raise CorpusError(f"{self._key}.{name}: holds no text; remove the source, or correct its path")

    def _read(self, name: str, place: int) -> Piece:
        cached = self._texts.get(name)
        if cached is None or cached[0] != place:
            document, number = self._places[name][place]
            cached = self._texts[name] = (place, document.read(number))
        return cached[1]

    def count(self, name: str, tokens: int) -> None:
        """Report that a piece of source `name` became so many tokens."""
        self._cursors[name].tokens += tokens

    def tokens(self) -> dict[str, int]:
        """Tokens taken from each source so far."""
        return {name: cursor.tokens for name, cursor in self._cursors.items()}

    def epochs(self) -> dict[str, float]:
        """How often each source has been read, e.g. 1.5."""
        return {name: c.epoch + c.index / len(self._places[name]) for name, c in self._cursors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next."""
        return {name: [c.epoch, c.index, c.offset, c.tokens] for name, c in self._cursors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CorpusError: the sources are not those of the state.
        """
        if state.keys() != self._cursors.keys() or any(
            index >= len(self._places[name]) for name, (_, index, *_) in state.items()
        ):
            raise CorpusError(
                f"The checkpoint was made with the sources {sorted(state)} and the files of that time; "
                "give back the same sources or start a new run"
            )
        self._cursors = {name: _Cursor(*numbers) for name, numbers in state.items()}

    def _order(self, name: str) -> list[int]:
        epoch = self._cursors[name].epoch
        cached = self._orders.get(name)
        if cached is None or cached[0] != epoch:
            order = list(range(len(self._places[name])))
            random.Random(f"{self._seed}/{name}/{epoch}").shuffle(order)
            cached = self._orders[name] = (epoch, order)
        return cached[1]


def look_at_sources(config: Config) -> list[str]:
    """Open every source once, so that what is missing or no text is found before anything is started.

    Returns:
        Warnings: what will be left out.

    Raises:
        CorpusError: as `Codebase` and `Mix`.
    """
    warnings: list[str] = []
    if Stage.pretrain in config.stages:
        codebase = Codebase(config.mix, warnings.append)
        for name, phase in config.mix.phases.items():
            if phase.kind is PhaseKind.pretrain:
                key = f"mix.phases.{name}.sources"
                Mix(key, phase.sources, codebase, phase.seq_len, config.seed, warnings.append)
    return warnings


def sample_text(mix: Mix, num_bytes: int) -> Iterator[str]:
    """Texts of about `num_bytes` in all, in the mix's proportions (of bytes), for training a tokenizer."""
    seen = 0
    while seen < num_bytes:
        name, piece = mix.next()
        size = len(piece.text.encode())
        mix.count(name, size)
        seen += size
        yield piece.text
