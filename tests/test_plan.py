"""Plans: what they say, that they are pure, and when a fingerprint changes."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import dash
from dash import _C
from dash import plan as plan_function
from dash.auto import choose_strategy, steps_apart_in_shift
from dash.device import DeviceModel
from dash.support import make_problem

BFLOAT16 = torch.bfloat16
SHAPE = (2, 1024, 8, 128)


def plan(q_shape=SHAPE, kv_shape=None, dtype=BFLOAT16, causal=False, **more) -> dash.Plan:
    kv_shape = q_shape if kv_shape is None else kv_shape
    return plan_function(q_shape, kv_shape, dtype, causal=causal, device="cpu", **more)


@pytest.mark.parametrize("strategy", ["auto", *_C.strategies()])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 8), (3, 8), (1, 2), (9, 2)])
def test_plan_says_what_the_binding_says(strategy, causal, head_dim, batch, kv_heads) -> None:
    q_shape, kv_shape = (batch, 1024, 8, head_dim), (batch, 1024, kv_heads, head_dim)
    problem = make_problem(q_shape, kv_shape, causal)
    if strategy != "auto" and _C.why_not(strategy, problem, 132) is not None:
        return  # test_every_strategy_is_taken_or_has_a_reason
    p = plan(q_shape, kv_shape, causal=causal, strategy=strategy)
    problem = make_problem(q_shape, kv_shape, causal, p.group_split)
    assert strategy in ("auto", p.strategy)
    assert p.tile_shape == _C.tile_shape(head_dim)
    assert p.chains == problem.chains
    assert p.tickets == _C.num_tickets(p.strategy, problem)
    assert p.cooperative == _C.is_cyclic(p.strategy)
    assert p.workspace_bytes == _C.workspace_bytes(problem, head_dim)
    assert p.grid == _C.num_ctas(p.strategy, problem, 132)
    assert p.device == DeviceModel("model of an H200", 132)
    assert set(p.alternatives) == {
        s for s in _C.strategies() if s != p.strategy and _C.why_not(s, problem, 132) is None
    }


def test_plan_is_frozen_and_prints() -> None:
    p = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.strategy = "other"
    text = str(p)
    for part in (p.strategy, p.fingerprint, f"{p.tile_q} query rows", f"{p.chains} chains", p.why):
        assert part in text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strategy", _C.strategies())
def test_every_strategy_is_taken_or_has_a_reason(strategy, causal) -> None:
    p = plan(causal=causal)
    assert {p.strategy, *p.reasons} == set(_C.strategies())
    assert p.strategy not in p.reasons
    problem = make_problem(SHAPE, SHAPE, causal)
    refusal = _C.why_not(strategy, problem, 132)
    if refusal is None:
        assert plan(causal=causal, strategy=strategy).strategy == strategy
    else:
        assert p.reasons[strategy] == refusal
        with pytest.raises(dash.UnsupportedError, match="needs"):
            plan(causal=causal, strategy=strategy)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strategy": "fastest"}, "strategy is 'fastest'; required: one of 'auto', "),
        ({"dtype": torch.float32}, "dtype is torch.float32; required"),
        ({"q_shape": (2, 64, 64)}, r"q_shape is \(2, 64, 64\); required: 4 positive sizes"),
        ({"q_shape": (2, 0, 8, 128)}, "q_shape is .*; required: 4 positive sizes"),
        ({"kv_shape": (3, 1024, 8, 128)}, "k has batch 3; required: 2"),
        ({"kv_shape": (2, 1024, 3, 128)}, "q has 8 heads and k has 3 kv_heads"),
        ({"q_shape": (2, 64, 8, 100)}, "head_dim 100; required: a multiple of 8"),
    ],
)
def test_errors(more, message) -> None:
    with pytest.raises(dash.UnsupportedError, match=message):
        plan(**more)


def test_predicted_time_is_near_the_ideal() -> None:
    assert 1.0 < plan(causal=True).predicted_over_ideal < 3.0
    slow = plan((1, 4096, 2, 64), causal=True, strategy="ascending").predicted_over_ideal
    assert slow > plan((1, 4096, 2, 64), causal=True).predicted_over_ideal


def test_sms_that_the_grid_leaves_idle_count_in_the_prediction() -> None:
    p = plan((133, 128, 1, 128), causal=False)  # a chain more than SMs: two rounds
    assert (p.strategy, p.grid) == ("shift", 67)
    assert 1.9 < p.predicted_over_ideal < 3.0


def test_a_plan_is_simulated_once(monkeypatch) -> None:
    p = plan((1, 640, 2, 64), causal=True)
    first = p.predicted_over_ideal
    monkeypatch.setattr("dash.schedule.simulate", None)
    assert p.predicted_over_ideal == first
    with pytest.raises(TypeError):
        _ = plan((1, 768, 2, 64), causal=True).predicted_over_ideal


# ---- auto ----------------------------------------------------------------------------------------


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
    name, why = choose_strategy(problem, resident_ctas)
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
@pytest.mark.parametrize("seqlen", [4096, 8192, 12288])
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
        (16320, 16, 128, "staggered"),  # 128 KV tiles, but chains of up to 4 · 255 steps
        (16321, 16, 128, "descending"),  # of 4 · 256
        (32640, 16, 64, "staggered"),
        (32641, 16, 64, "descending"),
        (65536, 28, 128, "serpentine"),
        (65536, 4, 128, "zigzag"),
    ],
)
def test_auto_plays_long_heads_one_at_a_time(seqlen, heads, head_dim, strategy) -> None:
    p = plan((1, seqlen, heads, head_dim), (1, seqlen, 4, head_dim), causal=True)
    assert p.strategy == strategy


@pytest.mark.parametrize(
    ("seqlens", "heads", "head_dim", "resident_ctas", "strategy"),
    [
        ((512, 512), 8, 128, 132, "symmetric_shift"),
        ((2048, 2048), 8, 128, 132, "symmetric_shift"),  # 16 KV tiles
        ((2049, 2049), 8, 128, 132, "zigzag"),
        ((129, 129), 8, 104, 132, "symmetric_shift"),
        ((128, 128), 8, 128, 132, "zigzag"),  # one KV tile waits for nobody
        ((512, 512), 8, 64, 132, "zigzag"),  # a KV tile has one q tile
        ((512, 640), 8, 128, 132, "zigzag"),  # symmetric_shift wants a square
        ((2048, 2048), 8, 128, 8, "symmetric_shift"),
        ((2048, 2048), 8, 128, 7, "zigzag"),  # and its 8 tickets resident
    ],
)
def test_auto_takes_symmetric_shift_where_tiles_are_few(
    seqlens, heads, head_dim, resident_ctas, strategy
) -> None:
    shapes = ((1, seqlen, heads, head_dim) for seqlen in seqlens)
    name, why = choose_strategy(make_problem(*shapes, True), resident_ctas)
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
    assert choose_strategy(make_problem(*shapes, True), resident_ctas)[0] == strategy


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
        (24576, 16, 16, 128, "staggered"),
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
    assert ("L2 has lost it" in p.why) == (strategy == "staggered")


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
    assert steps_apart_in_shift(problem) == pytest.approx(average)


def test_auto_says_what_shift_lacks() -> None:
    problem = make_problem((1, 8192, 4, 128), (1, 8192, 4, 128), False)
    assert choose_strategy(problem, 64) == ("shift", "auto: the full mask")
    name, why = choose_strategy(problem, 63)
    assert name == "staggered"
    assert _C.why_not("shift", problem, 63) in why


# ---- The fingerprint -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_fingerprint_is_the_same_for_every_batch_and_device(causal) -> None:
    prints = {plan((b, *SHAPE[1:]), causal=causal).fingerprint for b in (1, 2, 7, 64)}
    assert len(prints) == 1
    p = plan(causal=causal)
    other = dataclasses.replace(p, device=DeviceModel("small", 16), grid=16)
    assert other.fingerprint == p.fingerprint


@pytest.mark.parametrize("strategy", _C.strategies())
def test_order_does_not_depend_on_the_batch(strategy) -> None:
    """What the fingerprint of one sequence stands for: every sequence of a batch has its order."""
    for causal in (False, True):
        one = make_problem((1, 700, 6, 64), (1, 700, 3, 64), causal)
        many = make_problem((5, 700, 6, 64), (5, 700, 3, 64), causal)
        if _C.why_not(strategy, many, 132) is not None:
            continue
        alone = order_of(strategy, one)
        together = order_of(strategy, many)
        for batch in range(5):
            assert {key[1:]: rows for key, rows in together.items() if key[0] == batch} == {
                key[1:]: rows for key, rows in alone.items()
            }


def order_of(strategy: str, problem: object) -> dict:
    chains = [
        chain
        for ticket in range(_C.num_tickets(strategy, problem))
        for chain in _C.ticket(strategy, problem, ticket)
    ]
    return {(batch, head, tile): rows for batch, head, tile, rows in chains}


def test_fingerprint_changes_with_whatever_changes_bits() -> None:
    base = {"q_shape": SHAPE, "kv_shape": SHAPE, "causal": True, "strategy": "ascending"}
    changes = [
        {},
        {"strategy": "spt"},
        {"strategy": "descending"},
        {"causal": False},
        {"q_shape": (2, 1023, 8, 128)},
        {"kv_shape": (2, 1025, 8, 128)},
        {"kv_shape": (2, 1024, 4, 128)},
        {"q_shape": (2, 1024, 16, 128)},
        {"q_shape": (2, 1024, 8, 64), "kv_shape": (2, 1024, 8, 64)},
        {"dtype": torch.float16},
    ]
    prints = [plan(**(base | change)).fingerprint for change in changes]
    assert len(set(prints)) == len(prints)


def test_fingerprint_is_stable() -> None:
    """A golden value: if it changes, gradients may have changed; see plan.ORDER_VERSION."""
    p = plan((1, 512, 2, 64), causal=True, strategy="ascending", dtype=BFLOAT16)
    assert p.fingerprint == "de46d7059871b2b5"


def test_plans_of_long_problems_are_cheap() -> None:
    start = time.perf_counter()
    p = plan((1, 16384, 16, 128), causal=True)
    planned = time.perf_counter() - start
    assert p.fingerprint == p.fingerprint
    took = time.perf_counter() - start
    assert planned < 1, "plan() itself reads no schedule"
    assert took < 20, "the fingerprint of a 16k sequence takes about half a second"
    start = time.perf_counter()
    assert plan((1, 16384, 16, 128), causal=True).fingerprint == p.fingerprint
    assert time.perf_counter() - start < 0.1, "both are cached"
