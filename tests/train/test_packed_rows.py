"""Rows of texts: nothing lost, nothing twice, and the same rows at each start."""

import numpy as np
import pytest

from jaxkern.train.packed_rows import PackedRows

LENGTH = 8


def texts(seed=0, n=40):
    """Every token another number, so that each can be found again."""
    sizes = np.random.default_rng(seed).integers(1, 30, n)
    ends = np.cumsum(sizes)
    return [
        np.arange(e - s, e, dtype=np.int32) for s, e in zip(sizes, ends, strict=True)
    ]


def test_each_pass_has_every_piece_once_in_its_own_order():
    rows = PackedRows(texts(), LENGTH, seed=3)
    n = len(rows.rows)
    passes = []
    for epoch in range(2):
        batches = [rows.batch(epoch * n + i, 1) for i in range(n)]
        passes.append(np.concatenate([b["tokens"][b["mask"]] for b in batches]))
        for b in batches:
            assert (b["tokens"][~b["mask"]] == 0).all()
            for s in np.unique(b["segment_ids"][b["mask"]]):
                (own,) = b["tokens"][b["segment_ids"] == s][None]
                assert len(own) > 1 and (np.diff(own) == 1).all(), "two texts in one"
    pieces = [t[i : i + LENGTH] for t in texts() for i in range(0, len(t), LENGTH)]
    expected = np.sort(np.concatenate([p for p in pieces if len(p) > 1]))
    for found in passes:
        np.testing.assert_array_equal(np.sort(found), expected)
    assert (passes[0] != passes[1]).any()
    assert rows.num_tokens == len(expected) > 0.9 * n * LENGTH, "much is empty"


def test_a_batch_is_known_by_its_number():
    """Whatever was read before: so a run goes on without a state of the data."""
    rows, again = (PackedRows(texts(), LENGTH, seed=3) for _ in range(2))
    expected = [rows.batch(i, 6) for i in range(9)]
    for i in (8, 2, 8, 0):
        for key, array in again.batch(i, 6).items():
            np.testing.assert_array_equal(array, expected[i][key])
    assert rows.digest == again.digest
    others = (texts(1), LENGTH), (texts(), LENGTH + 1)
    assert len({rows.digest, *(PackedRows(*o, seed=3).digest for o in others)}) == 3


def test_a_whole_pass_fills_the_last_batch_with_nothing():
    rows = PackedRows(texts(), LENGTH, seed=None)
    batches = rows.whole(7)
    assert {b["tokens"].shape for b in batches} == {(7, LENGTH)}
    assert sum(b["mask"].sum() for b in batches) == rows.num_tokens
    with pytest.raises(ValueError, match="no text has two tokens"):
        PackedRows([np.array([3])], LENGTH, seed=0)
