"""The order-revealing test: dQ is the sum in turn order; any other order has other bits.

With q = 0, lse = 0, out = 0 and V and dO nonzero in column 0 only, P is exactly 1 and dS is dO's
power of two at one chosen key of each KV tile. So KV tile i contributes exactly K[its key] times a
power of two to dQ, and K is free.

K spends each column on three KV tiles (a, b, c): big at a, -big at b, small at c, with small lost
in the rounding of big + small. The sum is small if c comes after both a and b, else 0. There is a
column for (π(t-2), π(t-1), π(t)) for every t of the order π of every q tile: an order with the same
sums has π(t) after both for every t, so it is π itself up to its first two terms, whose sum is the
same in both orders.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

import pytest
import torch
from gpu_conditions import OtherStream
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    DEVICE,
    ON_GPU,
    Inputs,
    Shape,
    gradients,
    make_problem,
    skip_if_refused,
    with_strategies,
)

from dash import _C

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
BIG_AND_SMALL = {BF16: (2.0**40, 1.0), FP16: (2.0**14, 2.0**-12)}
SCALE = 0.5

Order = tuple[int, ...]  # KV tiles by turn
Triple = tuple[int, int, int]


def orders_of(shape: Shape, strategy: str) -> dict[tuple[int, int, int], Order]:
    """(batch, kv head, q tile) → KV tiles in turn order, as the compiled schedule says."""
    problem = make_problem(shape)
    turns: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for ticket in range(_C.num_tickets(strategy, problem)):
        for batch, kv_head, kv_tile, rows in _C.ticket(strategy, problem, ticket):
            for q_tile, turn in rows:
                turns[batch, kv_head, q_tile][turn] = kv_tile
    return {tile: tuple(by[t] for t in range(len(by))) for tile, by in turns.items()}


def revealing_triples(orders: set[Order]) -> list[Triple]:
    found = {
        (min(a, b), max(a, b), c)
        for order in orders
        for a, b, c in zip(order, order[1:], order[2:], strict=False)
    }
    return sorted(found)


def contributions(shape: Shape, triples: list[Triple]) -> torch.Tensor:
    """(batch, kv_tiles, head_dim): what each KV tile adds to a dQ row of amplitude 1."""
    big, small = BIG_AND_SMALL[shape.dtype]
    terms = torch.zeros(shape.batch, make_problem(shape).kv_tiles, shape.head_dim)
    for index, (a, b, c) in enumerate(triples):
        batch, column = divmod(index, shape.head_dim)
        terms[batch, a, column], terms[batch, b, column], terms[batch, c, column] = big, -big, small
    return terms


def amplitudes(shape: Shape) -> torch.Tensor:
    """(seqlen_q, heads): dO's powers of two, so that a row in the wrong place shows."""
    rows = torch.arange(shape.seqlen_q)[:, None] + torch.arange(shape.heads)
    return 2.0 ** (rows % 3 - 1)


def revealing_inputs(shape: Shape, terms: torch.Tensor) -> Inputs:
    q, k = torch.zeros(shape.q_shape), torch.zeros(shape.kv_shape)
    dout, v = torch.zeros_like(q), torch.zeros_like(k)
    keys = slice(0, None, make_problem(shape).tile_kv)  # the first of each KV tile
    k[:, keys] = terms[:, :, None]
    v[:, keys, :, 0] = 1
    dout[..., 0] = amplitudes(shape)
    tensors = (t.to(DEVICE, shape.dtype) for t in (dout, q, k, v, torch.zeros_like(q)))
    lse = torch.zeros(shape.lse_shape, device=DEVICE)
    return Inputs(*tensors, lse, SCALE, shape.causal)


def sum_in_order(terms: torch.Tensor, order: Order) -> torch.Tensor:
    """fp32 sum over dimension 1 of (batch, kv_tiles, …), one KV tile after another."""
    total = terms[:, order[0]].clone()
    for kv_tile in order[1:]:
        total += terms[:, kv_tile]
    return total


def expected_dq(shape: Shape, terms: torch.Tensor, orders: dict) -> torch.Tensor:
    problem = make_problem(shape)
    keys = torch.arange(problem.kv_tiles) * problem.tile_kv
    rows = torch.arange(shape.seqlen_q)
    sees = rows[:, None] + problem.offset >= keys if shape.causal else rows[:, None] >= keys * 0
    amplitude = amplitudes(shape).unflatten(1, (shape.kv_heads, problem.heads_of_chain))
    dq = torch.zeros(shape.q_shape).unflatten(2, (shape.kv_heads, problem.heads_of_chain))
    totals: dict[tuple[int, Order], torch.Tensor] = {}  # heads with one order share their sums
    for (_, kv_head, q_tile), order in orders.items():
        tile = slice(q_tile * problem.tile_q, (q_tile + 1) * problem.tile_q)
        if (q_tile, order) not in totals:
            # (batch, kv tile, row, head_dim)
            seen = terms[:, :, None] * sees[tile].T[None, :, :, None]
            totals[q_tile, order] = sum_in_order(seen, order)[:, :, None]
        dq[:, tile, kv_head] = (
            totals[q_tile, order] * amplitude[tile, kv_head][None, :, :, None] * SCALE
        )
    return dq.flatten(2, 3)


def expected_dv(shape: Shape) -> torch.Tensor:
    """P is 1 where a key is seen: column 0 holds exact sums of dO's powers of two."""
    rows, keys = torch.arange(shape.seqlen_q)[:, None], torch.arange(shape.seqlen_k)
    sees = keys <= rows + shape.seqlen_k - shape.seqlen_q if shape.causal else rows >= keys * 0
    grouped = amplitudes(shape).unflatten(1, (shape.kv_heads, -1)).sum(2)
    dv = torch.zeros(shape.kv_shape)
    dv[..., 0] = sees.float().T @ grouped
    return dv


SHAPES = [
    Shape(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, causal, dtype, SCALE)
    for (heads, kv_heads, seqlen_q, seqlen_k), (head_dim, dtype), causal in itertools.product(
        (
            (24, 24, 768, 768),  # 6 KV tiles; more heads than the causal orders treat alike
            (12, 12, 1536, 1536),
            (12, 6, 700, 1100),  # GQA, ragged
            (4, 4, 1100, 700),
            (8, 8, 4096, 4096),
        ),
        ((128, BF16), (64, BF16), (64, FP16)),
        (False, True),
    )
]


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_dq_is_the_sum_in_turn_order_and_in_no_other(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    one_sequence = orders_of(shape, strategy)
    triples = revealing_triples(set(one_sequence.values()))
    shape = dataclasses.replace(shape, batch=-(-len(triples) // shape.head_dim))
    every_sequence = orders_of(shape, strategy)
    assert all(one_sequence[0, h, j] == order for (_, h, j), order in every_sequence.items())

    terms = contributions(shape, triples)
    for order in set(one_sequence.values()):
        assert_no_other_order_has_the_sum_of(order, terms)

    inputs = revealing_inputs(shape, terms)
    wanted = expected_dq(shape, terms, one_sequence)
    assert torch.equal(wanted.to(shape.dtype).float(), wanted), "the wanted sums are exact"
    wanted_dv = expected_dv(shape).to(shape.dtype)
    load = OtherStream() if ON_GPU else None
    for _ in range(20 if ON_GPU else 1):
        if load is not None:
            load.enqueue()
        dq, dk, dv = gradients(inputs, strategy)
        assert torch.equal(dq.float().cpu(), wanted)
        assert not dk.any()
        assert torch.equal(dv.cpu(), wanted_dv)


def assert_no_other_order_has_the_sum_of(order: Order, terms: torch.Tensor) -> None:
    """Shows it for every exchange of neighbours after the first two, and for the reverse."""
    total = sum_in_order(terms, order)
    for t in range(1, len(order) - 1):
        other = (*order[:t], order[t + 1], order[t], *order[t + 2 :])
        assert not torch.equal(sum_in_order(terms, other), total), f"turns {t}, {t + 1} can swap"
    if len(order) > 2:
        assert not torch.equal(sum_in_order(terms, order[::-1]), total)
