"""plan_varlen: each length's plan is the dense one's, and a pack is named by its lengths."""

from __future__ import annotations

import pickle
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dash
from dash import _C
from dash.support import make_problem

BF16 = torch.bfloat16
SHAPES = (5000, 8, 64), (6000, 2, 64)


def test_each_distinct_length_has_the_plan_of_its_dense_call() -> None:
    seqlens_q, seqlens_k = [100, 0, 2000, 100, 40], [100, 9, 3000, 100, 0]
    found = dash.plan_varlen(*SHAPES, BF16, causal=True, seqlens_q=seqlens_q, seqlens_k=seqlens_k)
    counts = [(s.seqlen_q, s.seqlen_k, s.count) for s in found.sequences]
    assert counts == [(100, 100, 2), (0, 9, 1), (2000, 3000, 1), (40, 0, 1)]
    assert found.batch == 5
    for one in found.sequences:
        if 0 in (one.seqlen_q, one.seqlen_k):
            assert one.plan is None
        else:
            shapes = (1, one.seqlen_q, 8, 64), (1, one.seqlen_k, 2, 64)
            assert one.plan == dash.plan(*shapes, BF16, causal=True)


@pytest.mark.parametrize("order", [{"strategy": "staggered"}, {"group_split": 2}])
def test_an_order_reaches_every_length(order) -> None:
    found = dash.plan_varlen(*SHAPES, BF16, causal=False, seqlens_q=[64, 900], **order)
    for one in found.sequences:
        shapes = (1, one.seqlen_q, 8, 64), (1, one.seqlen_k, 2, 64)
        assert one.plan == dash.plan(*shapes, BF16, causal=False, **order)


def test_the_fingerprint_is_of_the_set_of_lengths() -> None:
    def fingerprint(*seqlens: int, **more: object) -> str:
        options = {"causal": True, "seqlens_q": seqlens} | more
        return dash.plan_varlen(*SHAPES, BF16, **options).fingerprint

    assert re.fullmatch("[0-9a-f]{16}", fingerprint(100, 200))
    assert fingerprint(100, 200) == fingerprint(200, 100, 100, 0)
    assert fingerprint(100, 200) != fingerprint(100, 201)
    assert fingerprint(100, 200) != fingerprint(100, 200, causal=False)


def test_a_plan_is_printed_as_a_table() -> None:
    seqlens = [100, 0, 2000, 100]
    found = dash.plan_varlen(*SHAPES, BF16, causal=True, seqlens_q=seqlens)
    lines = str(found).splitlines()
    assert "4 of 3 distinct lengths" in str(found)
    assert found.fingerprint in str(found)
    for one, line in zip(found.sequences, lines[-3:], strict=True):
        assert line.split()[:3] == [f"{n:,}" for n in (one.count, one.seqlen_q, one.seqlen_k)]
        assert "nothing to do" in line if one.plan is None else one.plan.fingerprint in line


ERRORS = [
    ({"seqlens_q": [4000, 1001]}, "seqlens_q sums to 5001; required: at most 5000, the rows of q"),
    ({"seqlens_q": [5, -1]}, "seqlens_q has -1; required: no negative length"),
    ({"seqlens_q": [5, 1], "seqlens_k": [6]}, "seqlens_k has 1 lengths; required: 2, as seqlens_q"),
    ({"seqlens_q": [5], "strategy": "fastest"}, "strategy is 'fastest'"),
    ({"seqlens_q": [5], "strategy": "symmetric_shift"}, "strategy is 'symmetric_shift'; required"),
    ({"seqlens_q": [5], "group_split": 3}, "group_split is 3"),
    ({"seqlens_q": [], "group_split": 3}, "group_split is 3"),
    ({"seqlens_q": [], "dtype": torch.float32}, "dtype is torch.float32"),
    ({"seqlens_q": [5], "q_shape": (1, 5, 8, 64)}, r"q_shape is \(1, 5, 8, 64\); required: 3 pos"),
    ({"seqlens_q": [5], "kv_shape": (5, 3, 64)}, "q has 8 heads and k has 3 kv_heads"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:30] for _, m in ERRORS])
def test_errors(change, message) -> None:
    call = {"q_shape": SHAPES[0], "kv_shape": SHAPES[1], "dtype": BF16, "causal": True}
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.plan_varlen(**(call | change))


# ---- What the kernels decide is what the plan says -----------------------------------------------

SIZES = (
    st.integers(1, 300) | st.integers(1, 20_000) | st.sampled_from((64, 128, 4096, 8192, 32_768))
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(((16, 16), (32, 8), (8, 1), (7, 1), (64, 8))),
    st.sampled_from((64, 128)),
    st.booleans(),
    st.tuples(*(st.none() | st.sampled_from((0, 1, 100, 1023, 4096)) for _ in range(2))),
)
def test_the_kernels_choose_each_sequences_order_as_the_dense_call(
    lengths, square, all_heads, head_dim, causal, sizes
) -> None:
    """``_C.varlen_order`` runs the code that preprocess runs on the device."""
    heads, kv_heads = all_heads
    lengths = [(q, q) if square else (q, k) for q, k in lengths]
    totals = [sum(side) for side in zip(*lengths, strict=True)]
    shapes = (1, totals[0], heads, head_dim), (1, totals[1], kv_heads, head_dim)
    windows = dict(zip(("window_left", "window_right"), sizes, strict=True))
    order = _C.varlen_order(make_problem(*shapes, causal, **windows), lengths)
    assert sorted(index for index, *_ in order) == list(range(len(lengths)))
    for index, _, strategy, group_split in order:
        one = (1, lengths[index][0], heads, head_dim), (1, lengths[index][1], kv_heads, head_dim)
        plan = dash.plan(*one, BF16, causal=causal, device="cpu", **windows)
        assert (strategy, group_split) == (plan.strategy, plan.group_split)


def test_plan_takes_lengths_too() -> None:
    options = {"causal": True, "seqlens_q": [100, 900], "seqlens_k": [90, 0], "window_left": 50}
    assert dash.plan(*SHAPES, BF16, **options) == dash.plan_varlen(*SHAPES, BF16, **options)


def test_a_window_is_normalised_in_each_length() -> None:
    """CASES 32: lengths 100 and 5,000 with window_left 1,024."""
    options = {"causal": True, "seqlens_q": [100, 5000, 100]}
    shapes = (5200, 2, 64), (5200, 2, 64)
    windowed = dash.plan_varlen(*shapes, BF16, window_left=1024, **options)
    plain = dash.plan_varlen(*shapes, BF16, **options)
    short, long = windowed.sequences
    assert short.plan.fingerprint == plain.sequences[0].plan.fingerprint
    assert long.plan.fingerprint != plain.sequences[1].plan.fingerprint
    assert "window 1024 to the left" in str(windowed)


def test_a_plan_travels() -> None:
    found = dash.plan_varlen(*SHAPES, BF16, causal=True, seqlens_q=[100, 0, 2000], window_left=9)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert hash(again) == hash(found)
    assert str(again) == str(found)


def test_a_plan_of_65536_lengths_is_quick() -> None:
    seqlens = [n % 300 for n in range(2**16)]
    shapes = (sum(seqlens), 8, 64), (sum(seqlens), 2, 64)
    start = time.perf_counter()
    found = dash.plan_varlen(*shapes, BF16, causal=True, seqlens_q=seqlens)
    assert len(str(found).splitlines()) < 320
    assert time.perf_counter() - start < 10
