"""Packing: every token exactly once, shifted by one, with equal shapes on all ranks and balanced attention cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.rl.packing import attention_cost, pack, pack_to_score
from composer.types import NO_LABEL, Sample


def sample(length, start=0, group="g", version=0):
    ids = list(range(start + 1, start + length + 1))
    mask = [i >= 2 for i in range(length)]
    log_probs = [-float(i) if m else 0.0 for i, m in enumerate(mask)]
    return Sample(ids, mask, log_probs, [0.5 if m else 0.0 for m in mask], group, version)


def test_one_sample_is_shifted_by_one():
    [[rows]] = pack([sample(4)], 1, 64, pad_id=0, multiple_of=4)
    assert rows.tokens.tolist() == [[1, 2, 3, 0]]
    assert rows.labels.tolist() == [[NO_LABEL, 3, 4, NO_LABEL]]
    assert rows.positions.tolist() == [[0, 1, 2, 0]]
    assert rows.sampler_log_probs.tolist() == [[0.0, -2.0, -3.0, 0.0]]
    assert rows.advantages.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_short_samples_share_a_row_and_positions_start_again():
    [[rows]] = pack([sample(9), sample(5, 100), sample(5, 200)], 1, 1024, pad_id=0, multiple_of=8)
    assert rows.tokens.shape == (2, 8)
    assert rows.positions.tolist() == [list(range(8)), [0, 1, 2, 3, 0, 1, 2, 3]]
    assert rows.tokens[1].tolist() == [101, 102, 103, 104, 201, 202, 203, 204]


def test_ranks_are_balanced_by_attention_cost_not_by_tokens():
    # by tokens alone 33 | 17 + 17 would be fair; by cost the long sample weighs 64, a short one 24
    samples = [sample(33), sample(17, 100), sample(17, 200), sample(17, 300)]
    by_rank = pack(samples, 2, 1024, pad_id=0)
    tokens = [sum(int((r.positions > 0).sum()) for r in rank) for rank in by_rank]
    assert attention_cost(32, 32) == 64 and attention_cost(16, 32) == 24
    assert [np.unique(r.tokens[r.tokens > 0]).size for [r] in by_rank] == [32, 48], tokens


def test_too_short_a_sample_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        pack([sample(1)], 1, 64, pad_id=0)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 4), st.integers(16, 256))
def test_nothing_is_lost_and_all_ranks_meet_in_the_same_shapes(lengths, num_ranks, budget):
    samples = [sample(n, 1000 * i) for i, n in enumerate(lengths)]
    by_rank = pack(samples, num_ranks, budget, pad_id=0)
    assert len({len(r) for r in by_rank}) == 1
    shapes = {rows.tokens.shape for rank in by_rank for rows in rank}
    assert len(shapes) == 1
    (num_rows, row_len) = shapes.pop()
    assert num_rows * row_len <= budget or num_rows == 1
    labels = sorted(int(x) for rank in by_rank for rows in rank for x in rows.labels[rows.loss_mask])
    assert labels == sorted(t for s in samples for t, m in zip(s.token_ids[1:], s.loss_mask[1:], strict=True) if m)
    tokens = sorted(int(x) for rank in by_rank for rows in rank for x in rows.tokens[rows.tokens > 0])
    assert tokens == sorted(t for s in samples for t in s.token_ids[:-1])


def test_sequences_to_score_are_shifted_by_one_and_their_targets_numbered():
    [rows] = pack_to_score([[1, 2, 3], [7, 8, 9, 4, 5, 6]], 0, 1, 64, pad_id=0, multiple_of=4)
    assert rows.tokens.tolist() == [[7, 8, 9, 4, 5, 1, 2, 0]]
    assert rows.labels.tolist() == [[8, 9, 4, 5, 6, 2, 3, NO_LABEL]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert rows.targets.tolist() == [[2, 3, 4, 5, 6, 0, 1, -1]]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 4), st.integers(16, 256))
def test_every_target_is_scored_in_one_place_after_its_own_beginning(lengths, num_ranks, budget):
    sequences = [[1000 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    targets = [t for s in sequences for t in s[1:]]
    by_rank = [pack_to_score(sequences, rank, num_ranks, budget, pad_id=0) for rank in range(num_ranks)]
    shapes = {rows.tokens.shape for rank in by_rank for rows in rank}
    (num_rows, row_len) = shapes.pop()
    assert not shapes and len({len(r) for r in by_rank}) == 1
    assert num_rows * row_len <= budget or num_rows == 1
    found = []
    for rows in (rows for rank in by_rank for rows in rank):
        for row, column in np.argwhere(rows.targets >= 0):
            target = rows.targets[row, column]
            found.append(int(target))
            assert rows.labels[row, column] == targets[target]
            begun = column - rows.positions[row, column]
            seen = rows.tokens[row, begun : column + 1].tolist()
            sequence = sequences[targets[target] // 1000]
            assert seen == sequence[: len(seen)] and sequence[len(seen)] == targets[target]
    assert sorted(found) == list(range(len(targets)))
