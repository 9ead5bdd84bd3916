"""The grid decides the time and never the bits: smaller grids, as smaller chips would launch.

A grid of at most ``max_ctas`` plays the schedule as a chip with so many resident CTAs would:
other CTAs take other tickets, and each takes more of them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    UNLIMITED,
    Gradients,
    Inputs,
    Shape,
    make_problem,
    needs_gpu,
    random_inputs,
    same_bits,
    skip_if_refused,
    with_strategies,
)
from kernel_call import backward_into

import dash
from dash import _C
from dash.device import DeviceModel

# H200, H100 PCIe, H20 and a slice of one; one CTA alone must do for what waits in no circle.
GRIDS = (132, 114, 78, 20, 1)

# More tickets than 132 CTAs for every strategy, so that each grid is a different one; whole and
# ragged tiles, seqlen_q != seqlen_k, groups of 1, 2 and 7 q heads.
SHAPES = [
    Shape(3, heads, kv_heads, *lengths, head_dim, causal)
    for (heads, kv_heads, lengths), head_dim, causal in itertools.product(
        ((4, 4, (3072, 3072)), (8, 4, (3072, 3072)), (28, 4, (3072, 3072)), (6, 3, (900, 2100))),
        (64, 128),
        (False, True),
    )
]
FP16 = [Shape(3, 8, 4, 3072, 3072, d, True, torch.float16) for d in (64, 128)]
CYCLIC = [p for p in with_strategies(SHAPES) if _C.is_cyclic(p.values[1])]


def new_gradients(inputs: Inputs) -> Gradients:
    """NaN everywhere, so that what a kernel leaves out shows."""
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (inputs.q, inputs.k, inputs.v))
    return dq, dk, dv


def smallest_grid(shape: Shape, strategy: str) -> int:
    """The fewest CTAs that ``why_not`` accepts."""
    problem = make_problem(shape)
    return next(n for n in range(1, UNLIMITED) if _C.why_not(strategy, problem, n) is None)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES + FP16))
def test_smaller_grids_compute_the_same_bits(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    wanted = new_gradients(inputs)
    backward_into(wanted, shape, inputs, strategy)
    assert not any(t.isnan().any() for t in wanted)
    for ctas in (*GRIDS, smallest_grid(shape, strategy)):
        if _C.why_not(strategy, make_problem(shape), ctas) is not None:
            continue
        got = new_gradients(inputs)
        backward_into(got, shape, inputs, strategy, max_ctas=ctas)
        assert same_bits(got, wanted), f"{ctas} CTAs"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), CYCLIC)
def test_too_few_ctas_for_a_circle_of_chains_raise(shape: Shape, strategy: str) -> None:
    """An error that names given and wanted, and outputs that nobody touched; never a hang."""
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    wanted = smallest_grid(shape, strategy)
    assert wanted > 1, "these chains wait for nobody: choose a longer shape"
    for given in sorted({1, wanted - 1}):
        grads = new_gradients(inputs)
        message = f"strategy '{strategy}' needs {wanted} CTAs .*, got {given}$"
        with pytest.raises(ValueError, match=message):
            backward_into(grads, shape, inputs, strategy, max_ctas=given)
        torch.cuda.synchronize()
        assert all(t.isnan().all() for t in grads)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_counts_the_ctas_that_the_binding_counts(shape: Shape) -> None:
    plan = dash.plan(shape.q_shape, shape.kv_shape, shape.dtype, causal=shape.causal)
    resident = _C.resident_ctas(torch.cuda.current_device(), "bfloat16", shape.head_dim)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    problem = make_problem(shape, plan.group_split)
    assert plan.device == DeviceModel(properties.name, resident)
    assert resident % properties.multi_processor_count == 0
    assert plan.grid == _C.num_ctas(plan.strategy, problem, resident)


# ---- What needs no GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_the_shapes_fill_every_grid(shape: Shape, strategy: str) -> None:
    assert _C.num_tickets(strategy, make_problem(shape)) > max(GRIDS)


@pytest.mark.parametrize("strategy", _C.strategies())
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("seqlen", [100, 1000, 1024, 5000, 16384])
@pytest.mark.parametrize("resident", [20, 78, 114, 132])
def test_the_grid_has_the_rounds_of_all_resident_ctas(strategy, batch, seqlen, resident) -> None:
    for causal in (False, True):
        problem = make_problem(Shape(batch, 6, 3, seqlen, seqlen, 128, causal))
        if _C.why_not(strategy, problem, resident) is not None:
            continue
        tickets = _C.num_tickets(strategy, problem)
        most = min(resident, tickets)
        grid = _C.num_ctas(strategy, problem, resident)
        if not _C.is_cyclic(strategy):
            assert grid == most
            continue
        group = _C.resident_ctas_needed(strategy, problem)
        assert group <= grid <= most
        assert math.ceil(tickets / grid) == math.ceil(tickets / most)
        if grid < most:
            assert grid % group == 0
            assert grid == group or math.ceil(tickets / (grid - group)) > math.ceil(tickets / grid)


def test_the_grid_of_whole_rounds_leaves_out_what_saves_no_round() -> None:
    full = make_problem(Shape(16, 16, 16, 1024, 1024, 128))  # 2,048 tickets, groups of 8
    assert [_C.num_ctas("shift", full, n) for n in (132, 128, 127, 114, 8)] == [
        128,
        128,
        127,  # 17 rounds: 121 would do, but 128 are not there
        114,
        8,
    ]
    causal = make_problem(Shape(8, 16, 16, 2048, 2048, 128, causal=True))  # 1,024 of two chains
    assert [_C.num_ctas("symmetric_shift", causal, n) for n in (132, 127, 114, 8)] == [
        128,
        120,  # 9 rounds, like 127
        114,  # 9 rounds: 120 are not there
        8,
    ]
    with pytest.raises(ValueError, match="resident_ctas must be positive, got 0"):
        _C.num_ctas("shift", full, 0)


@pytest.mark.parametrize("strategy", [s for s in _C.strategies() if _C.is_cyclic(s)])
def test_some_shape_is_refused_on_twenty_ctas_and_some_is_not(strategy: str) -> None:
    grids = [smallest_grid(*p.values) for p in CYCLIC if p.values[1] == strategy]
    assert min(grids) <= 20
    assert all(1 < grid <= 78 for grid in grids)
