"""What "auto" chooses, problem by problem: the rules of dash/auto.py."""

from __future__ import annotations

import pytest
import torch

import dash
from dash import _C
from dash.auto import choose
from dash.support import make_problem


def plan(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], *, causal: bool) -> dash.Plan:
    return dash.plan(q_shape, kv_shape, torch.bfloat16, causal=causal, device="cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 100, 1024, 4000])
@pytest.mark.parametrize("seqlen_k", [1, 100, 1024, 4000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_always_finds_a_strategy_whatever_the_batch(seqlen_q, seqlen_k, head_dim, causal):
    taken = {
        plan((b, seqlen_q, 8, head_dim), (b, seqlen_k, 2, head_dim), causal=causal).strategy
        for b in (1, 2, 3, 64)
    }
    assert len(taken) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("resident_ctas", [1, 2, 16, 78, 132])
def test_auto_takes_what_a_small_chip_can_run(resident_ctas, causal) -> None:
    problem = make_problem((1, 8192, 4, 64), (1, 8192, 4, 64), causal)
    name, _, why = choose(problem, resident_ctas)
    assert _C.why_not(name, problem, resident_ctas) is None
    assert why.startswith("auto")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "strategy"),
    [
        (8, 8, 64, "zigzag"),
        (8, 8, 128, "zigzag"),
        (16, 4, 128, "staggered"),  # chains differ by 4 · 2 steps
        (20, 4, 128, "serpentine"),
        (28, 4, 64, "staggered"),  # by 7 · 1
        (36, 4, 64, "serpentine"),
    ],
)
@pytest.mark.parametrize("seqlen", [8192, 12288, 16384])
def test_auto_takes_the_orders_that_were_fastest(heads, kv_heads, head_dim, strategy, seqlen):
    p = plan((1, seqlen, heads, head_dim), (1, seqlen, kv_heads, head_dim), causal=True)
    assert p.strategy == strategy
    assert p.why.startswith("auto: the causal mask")
    shares = f"{heads // kv_heads} q heads to a KV head"
    assert (shares in p.why) == (strategy != "zigzag")
    assert p.group_split == 1


@pytest.mark.parametrize(
    ("seqlen", "heads", "head_dim", "strategy"),
    [
        (16384, 16, 128, "staggered"),
        (65536, 16, 64, "staggered"),
        (65536, 28, 128, "serpentine"),
        (65536, 4, 128, "zigzag"),
    ],
)
def test_auto_keeps_its_strategy_for_long_sequences(seqlen, heads, head_dim, strategy) -> None:
    p = plan((1, seqlen, heads, head_dim), (1, seqlen, 4, head_dim), causal=True)
    assert p.strategy == strategy


@pytest.mark.parametrize(
    ("seqlens", "heads", "head_dim", "resident_ctas", "strategy"),
    [
        ((512, 512), 8, 128, 132, "symmetric_shift"),
        ((4096, 4096), 8, 128, 132, "symmetric_shift"),  # 32 KV tiles
        ((4097, 4097), 8, 128, 132, "zigzag"),
        ((129, 129), 8, 104, 132, "symmetric_shift"),
        ((128, 128), 8, 128, 132, "zigzag"),  # one KV tile waits for nobody
        ((2048, 2048), 8, 64, 132, "symmetric_shift"),  # 16 KV tiles of one q tile
        ((2049, 2049), 8, 64, 132, "zigzag"),
        ((512, 640), 8, 128, 132, "zigzag"),  # symmetric_shift wants a square
        ((4096, 4096), 12, 128, 132, "symmetric_shift"),  # 384 tickets of 8,192 tokens: 2.9 rounds
        ((4096, 4096), 10, 128, 132, "zigzag"),  # 2.4
        ((4096, 4096), 2, 128, 132, "zigzag"),  # 0.5
        ((4096, 4096), 8, 128, 114, "zigzag"),  # 2.2
        ((2048, 2048), 8, 128, 8, "symmetric_shift"),
        ((2048, 2048), 8, 128, 7, "zigzag"),  # and its 8 tickets resident
    ],
)
def test_auto_takes_symmetric_shift_where_tiles_are_few_and_rounds_full(
    seqlens, heads, head_dim, resident_ctas, strategy
) -> None:
    shapes = ((1, seqlen, heads, head_dim) for seqlen in seqlens)
    name, _, why = choose(make_problem(*shapes, True), resident_ctas)
    assert name == strategy
    assert why.startswith("auto: the causal mask, a KV head for each q head")


@pytest.mark.parametrize(
    ("seqlen", "kv_heads", "resident_ctas", "strategy"),
    [
        (8192, 4, 132, "serpentine"),
        (8192, 4, 128, "serpentine"),
        (8192, 4, 127, "staggered"),  # its blocks do not fit a smaller chip
        (8192, 5, 132, "staggered"),  # 25 tiles abreast, and 128 is no multiple
        (3072, 4, 132, "staggered"),  # 12 of 24
        (4096, 4, 132, "serpentine"),  # 16 of 32
    ],
)
def test_auto_takes_serpentine_where_its_blocks_fill_the_chip(
    seqlen, kv_heads, resident_ctas, strategy
) -> None:
    shapes = (1, seqlen, 7 * kv_heads, 128), (1, seqlen, kv_heads, 128)
    assert choose(make_problem(*shapes, True), resident_ctas).strategy == strategy


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", [(8192, 8192), (512, 512), (100, 3000)])
def test_auto_takes_shift_for_the_full_mask(head_dim, seqlens) -> None:
    seqlen_q, seqlen_k = seqlens
    p = plan((1, seqlen_q, 8, head_dim), (1, seqlen_k, 8, head_dim), causal=False)
    assert (p.strategy, p.why) == ("shift", "auto: the full mask")


@pytest.mark.parametrize(
    ("seqlen", "heads", "kv_heads", "head_dim", "strategy"),
    [
        (2048, 8, 4, 128, "shift"),  # 2 rows of 2 steps
        (2048, 12, 4, 128, "staggered"),  # 2 rows of 3
        (2048, 32, 8, 64, "shift"),  # 1 row of 4
        (2048, 28, 4, 64, "staggered"),
        (16384, 16, 16, 128, "shift"),  # 4 rows of 1
        (16385, 16, 16, 128, "ascending"),  # 129 KV tiles, one head fills the chip
        (24576, 16, 16, 128, "ascending"),
        (24576, 32, 8, 128, "staggered"),
        (32768, 32, 32, 64, "shift"),
        (16384, 8, 1, 64, "staggered"),  # 1 row of 8
        (2048, 8, 2, 64, "shift"),  # 1 row of 4
        (2048, 8, 2, 128, "staggered"),  # 2 rows of 4
    ],
)
def test_auto_leaves_shift_where_l2_would_lose_a_tile(seqlen, heads, kv_heads, head_dim, strategy):
    p = plan((1, seqlen, heads, head_dim), (1, seqlen, kv_heads, head_dim), causal=False)
    assert p.strategy == strategy
    assert p.why.startswith("auto: the full mask")
    assert ("L2 has lost it" in p.why) == (strategy != "shift")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_leaves_shift_where_rows_are_many_and_keys_few(head_dim) -> None:
    p = plan((1, 3000, 8, head_dim), (1, 100, 8, head_dim), causal=False)
    assert p.strategy == "staggered"
    assert "L2 has lost it" in p.why


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(
    "seqlens", [(8192, 8192), (1024, 1024), (4096, 512), (700, 5000), (3000, 3000), (64, 64)]
)
def test_steps_apart_are_those_of_the_schedule(seqlens, group) -> None:
    """Successive turns of a q tile in a head's first group: even, but for the last start."""
    problem = make_problem((1, seqlens[0], group, 128), (1, seqlens[1], 1, 128), False)
    chains = _C.resident_ctas_needed("shift", problem)
    when: dict[tuple[int, int], int] = {}
    for ticket in range(chains):
        for _, _, _, rows in _C.ticket("shift", problem, ticket):
            for position, (q_tile, turn) in enumerate(rows):
                when[q_tile, turn] = position * group
    even = problem.q_tiles // chains
    last = problem.q_tiles - even * (chains - 1)
    gaps = {when[q, t + 1] - when[q, t] for q, t in when if t + 1 < chains}
    assert gaps <= {even * group, last * group}
    assert even * group in gaps or chains == 1
    average = (even * (chains - 1) + last) / chains * group
    assert _C.steps_apart_in_shift(problem) == pytest.approx(average)


def test_auto_says_what_shift_lacks() -> None:
    problem = make_problem((1, 8192, 4, 128), (1, 8192, 4, 128), False)
    assert choose(problem, 64) == ("shift", 1, "auto: the full mask")
    name, _, why = choose(problem, 63)
    assert name == "staggered"
    assert _C.why_not("shift", problem, 63) in why


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "seqlen", "window", "strategy", "split"),
    [
        (16, 16, 128, 4096, 127, "staggered", 1),
        (16, 16, 128, 8192, 1023, "spt", 1),
        (32, 32, 64, 8192, 1023, "zigzag", 1),
        (32, 8, 128, 4096, 127, "descending", 1),
        (32, 8, 128, 8192, 1023, "spt", 2),
        (28, 4, 128, 8192, 1023, "descending", 1),  # seven parts are too many
        (8, 1, 128, 8192, 4095, "spt", 4),  # few chains ask for more
    ],
)
def test_auto_under_a_window(heads, kv_heads, head_dim, seqlen, window, strategy, split) -> None:
    shapes = (1, seqlen, heads, head_dim), (1, seqlen, kv_heads, head_dim)
    p = dash.plan(*shapes, torch.bfloat16, causal=True, window_left=window, device="cpu")
    assert (p.strategy, p.group_split) == (strategy, split)
    assert "window" in p.why


def test_a_window_that_cannot_bite_takes_what_the_problem_without_it_takes() -> None:
    shape = (1, 4096, 16, 128)
    plans = [
        dash.plan(shape, shape, torch.bfloat16, causal=True, window_left=left, device="cpu")
        for left in (None, 4095)
    ]
    assert plans[0].strategy == plans[1].strategy
    assert plans[0].fingerprint == plans[1].fingerprint
