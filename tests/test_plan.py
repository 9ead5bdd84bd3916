"""Plans: what they say, that they are pure, and when a fingerprint changes."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import dash
from dash import _C
from dash import plan as plan_function
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
    assert p.cyclic == _C.is_cyclic(p.strategy)
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
