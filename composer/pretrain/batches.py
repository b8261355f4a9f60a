"""The batches of a phase: the same on every rank, each of which takes its own rows; resumable to the row.

One batch is one optimizer step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from composer.errors import CorpusError
from composer.pretrain.mix import Codebase, Mix
from composer.pretrain.packing import DocumentPacker, Row, Session, empty_row, pack_sessions
from composer.pretrain.tokenizer import Encoder


class Batches(Protocol):
    """What a phase trains on."""

    num_steps: int
    """Optimizer steps until the phase's tokens are used up."""

    def next(self) -> list[Row]:
        """The rows of the next step, all ranks together."""
        ...

    def metrics(self) -> dict[str, float]:
        """Where the data stands."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        ...


class PretrainBatches:
    """Rows of `seq_len` tokens, packed from the mix."""

    def __init__(self, mix: Mix, encoder: Encoder, seq_len: int, batch_size: int, tokens: int) -> None:
        """Nothing is read yet."""
        self._mix, self._encoder, self._batch_size = mix, encoder, batch_size
        self._packer, self._rows = DocumentPacker(seq_len), []
        self.num_steps = -(-tokens // (seq_len * batch_size))

    def next(self) -> list[Row]:
        """`batch_size` full rows."""
        while len(self._rows) < self._batch_size:
            name, piece = self._mix.next()
            ids = self._encoder.encode(piece.text)
            if piece.ends_document:
                ids.append(self._encoder.document_end_id)
            self._mix.count(name, len(ids))
            self._rows += self._packer.add(ids)
        batch, self._rows = self._rows[: self._batch_size], self._rows[self._batch_size :]
        return batch

    def metrics(self) -> dict[str, float]:
        """Tokens taken from each source, and how often it has been read."""
        return {
            **{f"mix/tokens/{n}": float(v) for n, v in self._mix.tokens().items()},
            **{f"mix/epochs/{n}": v for n, v in self._mix.epochs().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """The mix's cursors and the rows already packed."""
        rows = [[r.tokens, r.labels, r.positions] for r in self._rows]
        return {"mix": self._mix.state_dict(), "packer": self._packer.state_dict(), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self._mix.load_state_dict(state["mix"])
        self._packer.load_state_dict(state["packer"])
        self._rows = [Row(*row) for row in state["rows"]]


class SessionBatches:
    """`batch_size` sessions a step from a pool that is shuffled anew in each epoch, whole sessions in each row."""

    def __init__(
        self,
        key: str,
        sessions: Sequence[Session],
        seq_len: int,
        batch_size: int,
        tokens: int,
        seed: int,
        multiple: int = 1,
        pad_id: int = 0,
    ) -> None:
        """Keep the pool; `key` is the phase's place in the config, for messages.

        Raises:
            CorpusError: there are no sessions, or one is longer than `seq_len`.
        """
        if not sessions:
            raise CorpusError("mix.sessions: there are no sessions to learn from; raise mix.sessions.num_sessions")
        longest = max(len(s.token_ids) for s in sessions)
        if longest > seq_len:
            raise CorpusError(
                f"{key}.seq_len={seq_len}: the longest session has {longest} tokens; raise it to at least {longest}"
            )
        self._pool, self._batch_size, self._seed = list(sessions), min(batch_size, len(sessions)), seed
        self._multiple, self._pad_id = multiple, pad_id
        self._epoch = self._index = 0
        self._order: tuple[int, list[int]] = (-1, [])
        # A session counts as a whole row, so that the number of steps follows from the config alone.
        self.num_steps = -(-tokens // (seq_len * batch_size))

    def next(self) -> list[Row]:
        """Few rows, as short as the longest session allows, so that little is padding."""
        chosen = [self._next_session() for _ in range(self._batch_size)]
        longest = max(len(s.token_ids) for s in chosen)
        return pack_sessions(chosen, longest, self._multiple, self._pad_id)

    def _next_session(self) -> Session:
        if self._order[0] != self._epoch:
            order = list(range(len(self._pool)))
            random.Random(f"{self._seed}/sessions/{self._epoch}").shuffle(order)
            self._order = (self._epoch, order)
        session = self._pool[self._order[1][self._index]]
        self._index += 1
        if self._index == len(self._pool):
            self._epoch, self._index = self._epoch + 1, 0
        return session

    def metrics(self) -> dict[str, float]:
        """How often the pool has been read."""
        return {"mix/epochs/sessions": self._epoch + self._index / len(self._pool)}

    def state_dict(self) -> dict[str, Any]:
        """Place in the pool."""
        return {"epoch": self._epoch, "index": self._index, "pool": len(self._pool)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there.

        Raises:
            CorpusError: the pool has another size than when the state was taken.
        """
        if state["pool"] != len(self._pool):
            raise CorpusError(
                f"The checkpoint was made with {state['pool']} sessions, now there are "
                f"{len(self._pool)}; give back mix.sessions or start a new run"
            )
        self._epoch, self._index = state["epoch"], state["index"]


def read_sessions(path: Path) -> list[Session]:
    """Sessions from JSON lines with `token_ids` and `loss_mask`.

    Raises:
        CorpusError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return [Session(d["token_ids"], d["loss_mask"]) for d in map(json.loads, lines)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}: the sessions cannot be read ({error}); delete it to make them again") from error


def codebase_rows(codebase: Codebase, encoder: Encoder, seq_len: int, tokens: int) -> list[Row]:
    """Rows of the held-out codebase of at most `tokens` tokens in all, the same in every run; one row at least."""
    packer, rows = DocumentPacker(seq_len), []
    wanted = max(1, tokens // seq_len)
    for piece in codebase.pieces():
        ids = encoder.encode(piece.text)
        if len(ids) > 1:
            rows += packer.add(ids)
        if len(rows) >= wanted:
            break
    if not rows:
        raise CorpusError(
            f"mix.codebase: its held-out documents do not fill one row of {seq_len} tokens; raise mix.codebase_share"
        )
    return rows[:wanted]


def rows_of_rank(rows: list[Row], rank: int, size: int, multiple: int = 1) -> list[Row]:
    """Every `size`-th row from `rank`.

    Every rank gets as many, a multiple of `multiple`, if need be rows without anything to learn.
    """
    count = -(-len(rows) // (size * multiple)) * multiple
    filled = rows + [empty_row(len(rows[0].tokens))] * (count * size - len(rows))
    return filled[rank::size]
