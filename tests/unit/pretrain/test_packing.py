"""Packing against rows written out by hand, and its invariants against random documents."""

import random

import pytest

from composer.pretrain.batches import SessionBatches, rows_of_rank
from composer.pretrain.packing import DocumentPacker, Row, Session, empty_row, pack_sessions
from composer.types import NO_LABEL

X = NO_LABEL


def test_documents_by_hand() -> None:
    packer = DocumentPacker(5)
    assert packer.add([11, 12, 13]) == []
    assert packer.add([21, 22, 23, 24, 25, 26, 27, 28, 29]) == [
        Row([11, 12, 13, 21, 22], [12, 13, X, 22, 23], [0, 1, 2, 0, 1]),
        Row([23, 24, 25, 26, 27], [24, 25, 26, 27, 28], [0, 1, 2, 3, 4]),
    ]
    assert packer.add([31, 32, 33]) == [Row([28, 29, 31, 32, 33], [29, X, 32, 33, X], [0, 1, 0, 1, 2])]


def test_nothing_is_lost_or_learned_across_documents() -> None:
    r, packer = random.Random(0), DocumentPacker(16)
    documents = [[1000 * d + i for i in range(r.randrange(1, 50))] for d in range(40)]
    rows = [row for document in documents for row in packer.add(document)]
    tokens = [t for row in rows for t in row.tokens]
    assert tokens == [t for d in documents for t in d][: len(tokens)]
    assert sum(map(len, documents)) - len(tokens) < 16
    for row in rows:
        assert len(row.tokens) == len(row.labels) == len(row.positions) == 16
        for t, (token, label, position) in enumerate(zip(row.tokens, row.labels, row.positions, strict=True)):
            assert label in (token + 1, X)
            assert position == 0 or row.tokens[t - 1] == token - 1
    # each document has exactly one token without a label: its last
    assert sum(label == X for row in rows for label in row.labels) == sum(t + 1 not in tokens for t in tokens[:-1]) + (
        rows[-1].labels[-1] == X
    )


def test_state_continues_the_open_row() -> None:
    packer, other = DocumentPacker(4), DocumentPacker(4)
    packer.add([1, 2, 3])
    other.load_state_dict(packer.state_dict())
    assert other.add([4, 5, 6, 7, 8]) == packer.add([4, 5, 6, 7, 8])


def test_sessions_by_hand() -> None:
    long = Session([1, 2, 3, 4, 5], [False, False, True, True, False])
    short = Session([6, 7], [False, True])
    assert pack_sessions([short, long], 8, multiple=4, pad_id=9) == [
        Row([1, 2, 3, 4, 5, 6, 7, 9], [X, 3, 4, X, X, 7, X, X], [0, 1, 2, 3, 4, 0, 1, 2])
    ]
    rows = pack_sessions([short, long], 5)
    assert rows == [
        Row([1, 2, 3, 4, 5], [X, 3, 4, X, X], [0, 1, 2, 3, 4]),
        Row([6, 7, 0, 0, 0], [7, X, X, X, X], [0, 1, 2, 3, 4]),
    ]
    assert [row.num_labels for row in rows] == [2, 1]


def test_sessions_are_never_split() -> None:
    r = random.Random(1)
    sessions = [Session([s] * (n := r.randrange(2, 30)), [True] * n) for s in range(1, 60)]
    rows = pack_sessions(sessions, 32, multiple=8)
    assert sum(x != X for row in rows for x in row.labels) == sum(len(s.token_ids) - 1 for s in sessions)
    for session in sessions:
        homes = [row for row in rows if session.token_ids[0] in row.tokens]
        assert len(homes) == 1
        assert homes[0].tokens.count(session.token_ids[0]) == len(session.token_ids)
    # first-fit decreasing needs at most 11/9 of the best possible, plus one
    assert len(rows) <= 11 / 9 * sum(len(s.token_ids) for s in sessions) / 32 + 1 + 1


def test_a_session_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="must fit into a row of 3 tokens, but has 4; raise seq_len"):
        pack_sessions([Session([1, 2, 3, 4], [True] * 4)], 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_all_rows_evenly(size: int) -> None:
    rows = [Row([i, i], [i, X], [0, 1]) for i in range(1, 6)]
    parts = [rows_of_rank(rows, rank, size, multiple=2) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % 2 == 0
    together = [row for part in parts for row in part if row != empty_row(2)]
    assert sorted(row.tokens[0] for row in together) == [1, 2, 3, 4, 5]


def test_session_batches_use_each_session_once_an_epoch_and_resume() -> None:
    sessions = [Session([i, i, i], [False, True, True]) for i in range(1, 8)]
    batches = SessionBatches("mix.phases.sft", sessions, seq_len=8, batch_size=2, tokens=112, seed=3)
    assert batches.num_steps == 7  # 112 tokens in rows of 8, two rows a step
    first = [row.tokens[0] for _ in range(3) for row in batches.next()]
    other = SessionBatches("mix.phases.sft", sessions, seq_len=8, batch_size=2, tokens=112, seed=3)
    other.load_state_dict(batches.state_dict())
    following = [[row.tokens for row in batches.next()] for _ in range(4)]
    assert following == [[row.tokens for row in other.next()] for _ in range(4)]
    assert sorted([*first, following[0][0][0]]) == [1, 2, 3, 4, 5, 6, 7]
    assert batches.metrics() == {"mix/epochs/sessions": 2.0}
