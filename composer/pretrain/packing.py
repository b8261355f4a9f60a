"""Documents and sessions into rows of fixed length. Pure: lists of ints, no torch.

A row holds tokens, labels (the id that follows each token; `NO_LABEL` where there is nothing to learn) and positions
(from 0 in each document). Attention stays inside a document because positions restart there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer.types import NO_LABEL


@dataclass(frozen=True)
class Row:
    """Three lists of one length."""

    tokens: list[int]
    labels: list[int]
    positions: list[int]

    @property
    def num_labels(self) -> int:
        """Tokens of the row from which something is learned."""
        return len(self.labels) - self.labels.count(NO_LABEL)


@dataclass(frozen=True)
class Session:
    """A conversation as ids; `loss_mask[t]` says whether `token_ids[t]` is the assistant's, so to be learned."""

    token_ids: list[int]
    loss_mask: list[bool]


class DocumentPacker:
    """Fills rows with documents, one behind the other; a document that does not fit goes on in the next row.

    Where a document is cut, nothing is lost: the last token of a row still has its label; the rest starts anew at
    position 0.

    Example:
        >>> packer = DocumentPacker(4)
        >>> packer.add([1, 2, 3]), packer.add([4, 5])
        ([], [Row(tokens=[1, 2, 3, 4], labels=[2, 3, -100, 5], positions=[0, 1, 2, 0])])
    """

    def __init__(self, row_length: int) -> None:
        """Rows have `row_length` tokens."""
        self._length = row_length
        self._tokens: list[int] = []
        self._labels: list[int] = []
        self._positions: list[int] = []

    def add(self, document: Sequence[int]) -> list[Row]:
        """Append a document; returns the rows that are full now."""
        self._tokens += document
        self._labels += [*document[1:], NO_LABEL]
        self._positions += range(len(document))
        rows = []
        while len(self._tokens) >= self._length:
            rows.append(Row(self._take(self._tokens), self._take(self._labels), self._take(self._positions)))
            self._positions[:] = range(len(self._tokens))  # what is left belongs to this document alone
        return rows

    def _take(self, values: list[int]) -> list[int]:
        taken = values[: self._length]
        del values[: self._length]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The row that is being filled."""
        return {"tokens": list(self._tokens), "labels": list(self._labels), "positions": list(self._positions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that row."""
        self._tokens, self._labels = list(state["tokens"]), list(state["labels"])
        self._positions = list(state["positions"])


def pack_sessions(sessions: Sequence[Session], row_length: int, multiple: int = 1, pad_id: int = 0) -> list[Row]:
    """Put whole sessions into rows; the rows are as long as the fullest one, rounded up to `multiple`.

    Longest first, each into the first row that has room (first-fit decreasing). A padded end keeps counting positions:
    it belongs to the last document, after everything that is learned, so it changes nothing.

    Args:
        sessions: what to pack; the token *before* an assistant's token gets it as its label.
        row_length: no row becomes longer (before rounding up).
        multiple: of the length.
        pad_id: what the ends are filled with.

    Raises:
        ValueError: a session is longer than `row_length`.
    """
    rows: list[list[Session]] = []
    for session in sorted(sessions, key=lambda s: -len(s.token_ids)):
        size = len(session.token_ids)
        if size > row_length:
            raise ValueError(f"a session must fit into a row of {row_length} tokens, but has {size}; raise seq_len")
        for row in rows:
            if sum(len(s.token_ids) for s in row) + size <= row_length:
                row.append(session)
                break
        else:
            rows.append([session])
    length = max(sum(len(s.token_ids) for s in row) for row in rows)
    length = -(-length // multiple) * multiple
    return [_session_row(row, length, pad_id) for row in rows]


def _session_row(sessions: Sequence[Session], length: int, pad_id: int) -> Row:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for session in sessions:
        ids, mask = session.token_ids, session.loss_mask
        tokens += ids
        labels += [i if m else NO_LABEL for i, m in zip(ids[1:], mask[1:], strict=True)] + [NO_LABEL]
        positions += range(len(ids))
    padding = length - len(tokens)
    last = positions[-1] + 1
    ends = range(last, last + padding)
    return Row(tokens + [pad_id] * padding, labels + [NO_LABEL] * padding, positions + list(ends))


def empty_row(length: int, pad_id: int = 0) -> Row:
    """A row with nothing to learn, for a rank that would otherwise have none."""
    return Row([pad_id] * length, [NO_LABEL] * length, list(range(length)))
