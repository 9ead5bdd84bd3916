"""The mask of csrc/schedule/mask.h, which kernels and schedules share, against a dense matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from schedule_play import contributions, problem, problems, visible

from dash import _C

many_examples = settings(max_examples=300, deadline=None)
with_windows = [
    example(problem=problem(3, seqlen_q=100, window_left=64, window_right=64)),
    example(problem=problem(8, seqlen_q=256, window_left=256, window_right=0)),  # unseen KV tiles
    example(problem=problem(1, seqlen_q=900, causal=True)),  # rows without keys
    example(problem=problem(1, seqlen_q=900, window_left=0, window_right=0)),
    example(problem=problem(5, window_left=0, window_right=0)),
    example(problem=problem(5, window_left=1)),
    example(problem=problem(5, window_right=1)),
]


def all_windows(test):
    for add in with_windows:
        test = add(test)
    return test


@all_windows
@many_examples
@given(problem=problems())
def test_columns_of_a_row(problem):
    for row, seen in enumerate(visible(problem)):
        columns = np.flatnonzero(seen)
        first, end = problem.first_column(row), problem.end_column(row)
        assert list(columns) == list(range(first, end))
    keyless = ~visible(problem).any(axis=1)
    assert list(np.flatnonzero(keyless)) == list(range(problem.keyless_rows))


@all_windows
@many_examples
@given(problem=problems())
def test_tile_ranges(problem):
    pairs = contributions(problem)
    for q_tile, tiles in enumerate(pairs):
        assert problem.kv_tiles_of(q_tile) == tiles.sum()
        if tiles.any():
            found = range(problem.first_kv_tile(q_tile), problem.end_kv_tile(q_tile))
            assert list(np.flatnonzero(tiles)) == list(found)
    for kv_tile, tiles in enumerate(pairs.T):
        assert problem.q_tiles_of(kv_tile) == tiles.sum()
        if tiles.any():
            found = range(problem.first_q_tile(kv_tile), problem.end_q_tile(kv_tile))
            assert list(np.flatnonzero(tiles)) == list(found)


@all_windows
@many_examples
@given(problem=problems())
def test_what_a_step_hides(problem):
    """Exactly the hidden scores of its rows that exist, and it says so where there are any."""
    seen = visible(problem)
    row, column = np.ogrid[: problem.tile_q, : problem.tile_kv]
    for q_tile, kv_tile in zip(*np.nonzero(contributions(problem)), strict=True):
        columns, first_row, last_row, hides_right, hides_left = problem.step_mask(q_tile, kv_tile)
        left_of = (column < columns) & (column + first_row <= row)
        right_of = row <= column + last_row
        rows = slice(q_tile * problem.tile_q, (q_tile + 1) * problem.tile_q)
        keys = slice(kv_tile * problem.tile_kv, (kv_tile + 1) * problem.tile_kv)
        wanted = np.zeros((problem.tile_q, problem.tile_kv), dtype=bool)
        exist = seen[rows, keys]
        wanted[: exist.shape[0], : exist.shape[1]] = exist
        shown = (left_of | (not hides_right)) & (right_of | (not hides_left))
        assert np.array_equal((left_of & right_of)[: exist.shape[0]], wanted[: exist.shape[0]])
        assert np.array_equal(shown[: exist.shape[0]], wanted[: exist.shape[0]])


@pytest.mark.parametrize(
    ("window", "left", "right"),
    [
        ({"window_left": 383}, -1, -1),  # the last row sees 384 keys
        ({"window_left": 382}, 382, -1),
        ({"window_right": 255}, -1, -1),  # the first row, and all others, see the last key
        ({"window_right": 254}, -1, 254),
        ({"window_right": 0}, -1, 0),
        ({"causal": True, "window_right": 7}, -1, 0),  # the intersection
        ({"causal": True, "window_left": 1000}, -1, 0),
        ({"causal": True, "window_left": 10}, 10, 0),
    ],
)
def test_a_window_that_cannot_bite_is_none(window, left, right):
    p = problem(3, seqlen_q=256, **window)
    assert (p.window_left, p.window_right) == (left, right)
    assert p.causal == (right == 0)
    assert p.windowed == (left >= 0 or right > 0)


def test_causal_stays_causal_where_it_hides_nothing():
    assert problem(1, seqlen_q=1, causal=True).causal


def test_largest_sizes_do_not_overflow():
    size = 2**30
    for window in ({}, {"causal": True}, {"window_left": size - 3, "window_right": size - 3}):
        p = _C.Problem(
            batch=1, heads=1, kv_heads=1, seqlen_q=size, seqlen_k=size, tile_q=64, tile_kv=128,
            **({"causal": False} | window),
        )  # fmt: skip
        assert p.end_column(size - 1) == size
        assert p.first_column(size - 1) == (2 if p.windowed else 0)
        assert p.end_kv_tile(p.q_tiles - 1) == p.kv_tiles
        assert p.end_q_tile(p.kv_tiles - 1) == p.q_tiles
