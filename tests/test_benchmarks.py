"""What the benchmarks compute around the GPU: shapes, summaries, ncu's page."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

pytest.importorskip("typer")

from benchmarks import summarize
from benchmarks.kernel_profile import parse_raw_page
from dash.bench.measure import window_orders
from dash.bench.shapes import SEQLENS, Shape, grid_shape, parse_shape, select_shapes

CAUSAL_4K = Shape(4, 4096, 16, 16, 128, True)


def test_the_grid_is_that_of_the_anchors() -> None:
    shapes = select_shapes(("full", "causal"), (64, 128), SEQLENS, gqa=True)
    assert len(shapes) == len(set(shapes)) == 32
    assert {s.batch * s.seqlen * s.heads * s.head_dim for s in shapes[:24]} == {16_384 * 2048}
    assert set(summarize.TARGETS) == {s.group for s in shapes}
    assert grid_shape(4096, 128, True) == CAUSAL_4K == parse_shape("4,4096,16,16,128,1")


def test_flops_are_those_of_the_anchors() -> None:
    """FA3 at this shape: 1.3734 ms are 500.4 TFLOPS."""
    assert CAUSAL_4K.flops / 1.3734e-3 / 1e12 == pytest.approx(500.4, abs=0.1)


def test_ratios_and_estimates() -> None:
    times = {CAUSAL_4K: {"dash": 2.0, "cudnn_nondet": 3.0}}
    anchors = {CAUSAL_4K: {"cudnn_nondet": 2.0, "fa3_nondet": 1.8, "fa3_det": 2.2}}
    summarize.add_estimates(times, anchors)
    assert times[CAUSAL_4K]["fa3_nondet~"] == pytest.approx(1.8 * 3 / 2)
    found = summarize.ratios(times, "fa3_det~", "dash")["causal D128"][CAUSAL_4K]
    assert found == pytest.approx(2.2 * 1.5 / 2)
    assert "met" in summarize.cell("causal D128", "fa3_det~", {CAUSAL_4K: 1.26})
    assert "missed" in summarize.cell("causal D128", "fa3_det~", {CAUSAL_4K: 1.24})
    assert "missed" in summarize.cell(
        "causal D128", "fa3_nondet", {CAUSAL_4K: 1.5, grid_shape(512, 128, True): 0.97}
    )


@pytest.mark.parametrize("providers", [1, 2, 3, 4, 9, 10])
def test_every_provider_follows_every_other_equally_often(providers) -> None:
    whole = providers * (1 + providers % 2)
    orders = window_orders(providers, whole)
    assert all(sorted(order) == list(range(providers)) for order in orders)
    neighbours = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(neighbours) == providers * (providers - 1)
    places = Counter(pair for order in orders for pair in enumerate(order))
    assert len(places) == providers**2
    assert len(set(neighbours.values())) <= 1
    assert len(set(places.values())) == 1
    assert window_orders(providers, 2 * whole + 1)[-1] == orders[0]


def test_no_neighbour_twice_in_a_few_rounds() -> None:
    pairs = [pair for order in window_orders(10, 3) for pair in itertools.pairwise(order)]
    assert len(set(pairs)) == len(pairs)
    assert window_orders(0, 2) == [[], []]


def test_raw_page_of_ncu() -> None:
    page = '==PROF== x\ncalled\n"ID","a.sum","b.pct"\n"","us","%"\n"0","1,024.5","77"\n'
    found = parse_raw_page(page)
    assert found["a.sum"] == ("1,024.5", "us")
    assert found["b.pct"] == ("77", "%")
    with pytest.raises(SystemExit):
        parse_raw_page("==ERROR== no kernels were profiled\n")
