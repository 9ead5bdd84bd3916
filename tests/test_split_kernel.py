"""Groups of q heads cut into parts, on the GPU: accuracy, order, repeats, batches, small grids."""

from __future__ import annotations

import itertools

import pytest
import torch
from accuracy import assert_accurate, judged_inputs
from inputs import (
    DEVICE,
    Shape,
    gradients,
    random_inputs,
    same_bits,
    skip_if_refused,
    strategies_for,
)
from kernel_call import backward_into
from split_cases import SUMS, expected, order_revealing_heads

from dash import _C

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(2, heads, kv_heads, *lengths, head_dim, causal, dtype)
    for (heads, kv_heads, lengths), (head_dim, dtype), causal in itertools.product(
        ((12, 2, (700, 700)), (8, 1, (1000, 300)), (6, 1, (130, 900)), (4, 2, (1, 257))),
        ((64, torch.bfloat16), (128, torch.bfloat16), (72, torch.float16)),
        (False, True),
    )
]
REPEATS = 100


def with_parts(shapes: list[Shape]) -> list:
    """Parameters ``shape, strategy, parts``: all ways to split a group, strategies in turn."""
    params = []
    for shape in shapes:
        group = shape.heads // shape.kv_heads
        ways = [parts for parts in range(2, group + 1) if group % parts == 0]
        for strategy, parts in itertools.product(strategies_for(shape), ways):
            params.append(pytest.param(shape, strategy, parts, id=f"{shape}-{strategy}-in-{parts}"))
    return params


@pytest.mark.parametrize(("shape", "strategy", "parts"), with_parts(SHAPES))
def test_gradients_of_split_groups_are_accurate(shape, strategy, parts) -> None:
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    got = gradients(inputs, strategy, parts)
    assert_accurate(got, reference, plain, f"{shape} {strategy} in {parts}")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("parts", SUMS)
@pytest.mark.parametrize("strategy", ["ascending", "shift", "staggered"])
def test_parts_are_added_in_ascending_order(strategy, parts, head_dim) -> None:
    inputs = order_revealing_heads(3, 5, head_dim, torch.bfloat16, DEVICE)
    _, dk, dv = gradients(inputs, strategy, parts)
    wanted_dk, wanted_dv = expected(inputs, parts)
    assert torch.equal(dk, wanted_dk)
    assert torch.equal(dv, wanted_dv)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ascending_adds_dq_as_in_whole_groups(head_dim, causal) -> None:
    inputs = random_inputs(Shape(2, 6, 1, 700, 900, head_dim, causal))
    whole, split = (gradients(inputs, "ascending", parts) for parts in (1, 3))
    assert same_bits(whole[:1], split[:1])
    assert not same_bits(whole[1:2], split[1:2])


@pytest.mark.parametrize(("shape", "strategy", "parts"), with_parts(SHAPES[:12]))
def test_split_groups_repeat(shape, strategy, parts) -> None:
    """Every repeat writes into outputs of NaN with a workspace of 0xFF bytes, on varying grids."""
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    first = gradients(inputs, strategy, parts)
    needs_all = _C.is_cyclic(strategy)
    grads = tuple(torch.empty_like(t) for t in first)
    for repeat in range(REPEATS):
        for t in grads:
            t.fill_(torch.nan)
        max_ctas = None if needs_all else (None, 114, 20, 1)[repeat % 4]
        backward_into(grads, shape, inputs, strategy, max_ctas, parts)
        assert same_bits(first, grads), f"repeat {repeat}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sequence_is_split_alike_in_every_batch(head_dim) -> None:
    """What auto takes for two KV heads of six q heads each: parts, and bits of neighbours free."""
    inputs = random_inputs(Shape(5, 12, 2, 500, 500, head_dim, causal=True))
    together = gradients(inputs)
    for first in range(5):
        alone = gradients(inputs.sequences(first))
        assert same_bits([t[first : first + 1] for t in together], alone)
