"""The CPU implementation adds in the planned order, bit by bit.

With q = 0 (or k = 0) all scores are 0, and lse = 0 makes P exactly 1: every product is a power of
two, exact in bf16 and fp32, and only the order of the sums is left to show.
"""

from __future__ import annotations

import pytest
import torch
from cpu_cases import Case, accepted_strategies, backward, problem_of

from dash import _C
from dash.reference import TurnOrderedSum, TurnOrderError


def order_revealing(count: int, columns: int, seed: int) -> torch.Tensor:
    """``(count, columns)`` fp32 terms; each column is one trial of the order of ``count`` terms.

    A trial has +2^40 and -2^40 in two places and small powers of two in the others. A small term
    that is added before the second big one is lost: the sum, exact in bf16, is that of the terms
    after it. Half of the trials have that one early in ascending order, half in descending order.
    """
    generator = torch.Generator().manual_seed(seed)
    terms = 2.0 ** torch.randint(0, 5, (count, columns), generator=generator)
    for column in range(columns):
        second = int(torch.randint(1, count, (), generator=generator))
        first = int(torch.randint(0, second, (), generator=generator))
        terms[first, column], terms[second, column] = 2.0**40, -(2.0**40)
    terms[:, ::2] = terms[:, ::2].flip(0)
    return terms


def fp32_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def orders(strategy: str, problem: object) -> tuple[dict, dict]:
    """{(kv_head, q_tile): kv tiles by turn} and {(kv_head, kv_tile): q tiles as visited}."""
    turns: dict = {}
    visits: dict = {}
    for ticket in range(_C.num_tickets(strategy, problem)):
        for _, kv_head, kv_tile, rows in _C.ticket(strategy, problem, ticket):
            visits[kv_head, kv_tile] = [q_tile for q_tile, _ in rows]
            for q_tile, turn in rows:
                turns.setdefault((kv_head, q_tile), {})[turn] = kv_tile
    by_turn = {key: [tiles[t] for t in range(len(tiles))] for key, tiles in turns.items()}
    return by_turn, visits


ORDER_CASES = [
    Case((1, 1024, 3, 64), (1, 1024, 3, 64)),
    Case((1, 1024, 3, 64), (1, 1024, 3, 64), causal=True),
    Case((1, 512, 4, 128), (1, 1024, 2, 128)),
    Case((1, 512, 4, 128), (1, 1024, 2, 128), causal=True),
    Case((1, 1100, 2, 64), (1, 700, 1, 64), causal=True),
]


def by_strategy(cases: list[Case]) -> list:
    pairs = [(case, name) for case in cases for name in accepted_strategies(case)]
    return [pytest.param(case, name, id=f"{name}-{case}") for case, name in pairs]


@pytest.mark.parametrize(("case", "strategy"), by_strategy(ORDER_CASES))
def test_dq_is_summed_in_turn_order(case, strategy) -> None:
    problem = problem_of(case)
    terms = [
        order_revealing(problem.kv_tiles, case.q_shape[3], seed)
        for seed in range(problem.kv_slices)
    ]
    q, out, dout = torch.zeros(3, *case.q_shape, dtype=case.dtype)
    k, v = torch.zeros(2, *case.kv_shape, dtype=case.dtype)
    dout[..., 0], v[..., 0] = 1, 1
    for kv_head in range(problem.kv_slices):  # one key a tile, its first
        for kv_tile in range(problem.kv_tiles):
            k[:, kv_tile * problem.tile_kv, kv_head] = terms[kv_head][kv_tile].to(case.dtype)
    dq, _, _ = backward(
        case, (q, k, v, dout), out, torch.zeros(lse_shape(case)), softmax_scale=1.0,
        strategy=strategy,
    )  # fmt: skip
    turns, _ = orders(strategy, problem)
    assert len(turns) > 1
    for (kv_head, q_tile), kv_tiles in turns.items():
        # The tile's last row sees the first key of every KV tile that contributes to the tile.
        row = min((q_tile + 1) * problem.tile_q, problem.seqlen_q) - 1
        wanted = fp32_sum([terms[kv_head][kv_tile] for kv_tile in kv_tiles]).to(case.dtype)
        for head in range(kv_head * problem.heads_of_chain, (kv_head + 1) * problem.heads_of_chain):
            assert torch.equal(dq[0, row, head], wanted), (q_tile, head)


@pytest.mark.parametrize(("case", "strategy"), by_strategy(ORDER_CASES))
def test_dk_and_dv_are_summed_in_visit_order_heads_innermost(case, strategy) -> None:
    problem = problem_of(case)
    group, shape = problem.heads_of_chain, case.q_shape
    # Heads are part of the order: a trial is one column over (q tile, head of the group).
    terms = [
        order_revealing(problem.q_tiles * group, shape[3], seed).unflatten(0, (-1, group))
        for seed in range(problem.kv_slices)
    ]
    q, out, dout = torch.zeros(3, *shape, dtype=case.dtype)
    k, v = torch.zeros(2, *case.kv_shape, dtype=case.dtype)
    v[..., 0] = 1
    for head in range(problem.heads):  # one query a tile, its last, which sees the most keys
        for q_tile in range(problem.q_tiles):
            row = min((q_tile + 1) * problem.tile_q, problem.seqlen_q) - 1
            term = terms[head // group][q_tile, head % group].to(case.dtype)
            q[:, row, head], dout[:, row, head] = term, term
            dout[:, row, head, 0] = 1  # dP = 1 through v
    _, dk, dv = backward(
        case, (q, k, v, dout), out, torch.zeros(lse_shape(case)), softmax_scale=1.0,
        strategy=strategy,
    )  # fmt: skip
    _, visits = orders(strategy, problem)
    for (kv_head, kv_tile), q_tiles in visits.items():
        order = [(q_tile, head) for q_tile in q_tiles for head in range(group)]
        wanted = fp32_sum([terms[kv_head][place] for place in order]).to(case.dtype)
        key = kv_tile * problem.tile_kv  # the tile's first key
        assert torch.equal(dk[0, key, kv_head], wanted), (kv_head, kv_tile)
        assert torch.equal(dv[0, key, kv_head, 1:], wanted[1:]), (kv_head, kv_tile)


def lse_shape(case: Case) -> tuple[int, int, int]:
    batch, seqlen, heads, _ = case.q_shape
    return batch, heads, seqlen


@pytest.mark.parametrize("count", [8, 16])
def test_the_order_tests_can_tell_orders_apart(count) -> None:
    """Any exchange of neighbours shows, but for the first two, whose sum does not depend on it."""
    terms = list(order_revealing(count, 64, seed=0))
    for i in range(1, count - 1):
        exchanged = [*terms[:i], terms[i + 1], terms[i], *terms[i + 2 :]]
        assert not torch.equal(fp32_sum(terms), fp32_sum(exchanged))


def test_turn_ordered_sum_waits_for_turns() -> None:
    sums = TurnOrderedSum()
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    for turn, term in ((3, -big), (1, one), (2, one), (0, big)):
        sums.add(0, turn, term)
    assert sums.finish()[0] == 0  # 2^24 + 1 + 1 - 2^24, left to right; any other order gives 1 or 2


def test_turn_ordered_sum_reports_broken_schedules() -> None:
    sums = TurnOrderedSum()
    sums.add(0, 1, torch.ones(()))
    with pytest.raises(TurnOrderError, match="no earlier turn"):
        sums.finish()
    with pytest.raises(TurnOrderError, match="twice"):
        sums.add(0, 1, torch.ones(()))
