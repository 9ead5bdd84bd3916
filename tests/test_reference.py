"""The CPU implementation: against fp64 autograd, and its order of additions bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import dash
from dash import _C
from dash.reference import TurnOrderedSum, TurnOrderError
from dash.support import make_problem

H200_SMS = 132


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small products: threads cost more than they bring, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case(NamedTuple):
    """One attention; shapes are ``(batch, seqlen, heads, head_dim)``."""

    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"q{self.q_shape}-kv{self.kv_shape}-{mask}-{str(self.dtype)[6:]}".replace(" ", "")


def problem_of(case: Case) -> object:
    return make_problem(case.q_shape, case.kv_shape, case.causal)


def accepted_strategies(case: Case) -> list[str]:
    problem = problem_of(case)
    return [name for name in _C.strategies() if _C.why_not(name, problem, H200_SMS) is None]


def random_inputs(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (case.q_shape, case.kv_shape, case.kv_shape, case.q_shape)
    return tuple(torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)


def hidden_keys(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """``(seqlen_q, seqlen_k)`` bool, true where a query may not see a key."""
    row = torch.arange(seqlen_q)[:, None]
    return (torch.arange(seqlen_k)[None] > row + seqlen_k - seqlen_q) & causal


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by plain operations in the dtype of q; rows without keys give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    hidden = hidden_keys(q.shape[2], k.shape[2], causal)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1).masked_fill(hidden, 0.0)
    return (p @ v).transpose(1, 2), scores.logsumexp(-1)


def gradients(inputs: tuple[torch.Tensor, ...], causal: bool, dtype: torch.dtype) -> tuple:
    """out, lse and (dq, dk, dv) by autograd in ``dtype``."""
    q, k, v = (t.to(dtype).requires_grad_() for t in inputs[:3])
    out, lse = attend(q, k, v, causal)
    return out.detach(), lse.detach(), torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))


def assert_accurate(got: tuple, exact: tuple, plain: tuple) -> None:
    """DESIGN §6: max|x - ref| ≤ 2·max|pt - ref| + 2·max|((ref + 0.3) - 0.3) - ref|."""
    for name, x, ref, pt in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
        rounded = ref.to(x.dtype)
        allowed = 2 * (pt.double() - ref).abs().max()
        allowed += 2 * ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
        error = (x.double() - ref).abs().max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def backward(case: Case, inputs: tuple, out: torch.Tensor, lse: torch.Tensor, **more: object):
    q, k, v, dout = inputs
    return torch.ops.dash.attention_bwd(
        dout, q, k, v, out.to(case.dtype), lse.float(), causal=case.causal, **more
    )


def check_all_strategies(case: Case, inputs: tuple[torch.Tensor, ...] | None = None) -> None:
    inputs = random_inputs(case) if inputs is None else inputs
    out, lse, exact = gradients(inputs, case.causal, torch.float64)
    plain = gradients(inputs, case.causal, case.dtype)[2]
    exact, plain = (tuple(t.nan_to_num(0.0) for t in grads) for grads in (exact, plain))
    for strategy in accepted_strategies(case):
        got = backward(case, inputs, out, lse, strategy=strategy)
        assert all(g.isfinite().all() for g in got), strategy
        assert_accurate(got, exact, plain)


SHAPES = [
    ((1, 256, 2, 64), (1, 256, 2, 64)),
    ((2, 512, 4, 64), (2, 512, 2, 64)),
    ((2, 1024, 4, 64), (2, 1024, 4, 64)),
    ((1, 300, 4, 128), (1, 300, 1, 128)),
    ((1, 200, 2, 72), (1, 333, 2, 72)),
    ((1, 333, 2, 40), (1, 200, 1, 40)),
    ((3, 129, 3, 8), (3, 127, 3, 8)),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_shape", "kv_shape"), SHAPES)
def test_every_strategy_is_accurate(q_shape, kv_shape, causal) -> None:
    check_all_strategies(Case(q_shape, kv_shape, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_float16_is_accurate(causal) -> None:
    check_all_strategies(Case((1, 256, 4, 64), (1, 256, 2, 64), causal, torch.float16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [64, 192, 320, 640, 704, 832])
def test_masked_tails_do_not_overflow_at_very_negative_lse(seqlen, dtype, causal) -> None:
    """CASES 2: the zero-filled tail of a KV tile times exp(-lse) must not become inf · 0."""
    case = Case((1, seqlen, 1, 64), (1, seqlen, 1, 64), causal, dtype)
    q, k, v, dout = random_inputs(case)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1, -960
    lse = gradients((q, k, v, dout), causal, torch.float64)[1]
    assert lse.max() < -88
    check_all_strategies(case, (q, k, v, dout))


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_one_token(head_dim) -> None:
    """CASES 3: softmax of one score is constant, so dQ = dK = 0 and dV = dO."""
    case = Case((1, 1, 3, head_dim), (1, 1, 3, head_dim))
    q, k, v, dout = random_inputs(case)
    q, k, v = q * 3, k * 3, v * 3
    out, lse, _ = gradients((q, k, v, dout), False, torch.float64)
    dq, dk, dv = backward(case, (q, k, v, dout), out, lse)
    # P is exp2 of a difference that is 0 up to rounding, so dP - delta cancels up to rounding too.
    assert dq.abs().max() < 1e-4
    assert dk.abs().max() < 1e-4
    assert torch.equal(dv, dout)


@pytest.mark.parametrize("junk", [0.0, torch.inf, -torch.inf, torch.nan])
def test_rows_without_keys_are_exact_zeros_whatever_they_hold(junk) -> None:
    """CASES 4: sq > sk, causal; the other rows equal the square problem on the last sk rows."""
    case = Case((1, 512, 2, 64), (1, 256, 1, 64), causal=True)
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, True, torch.float64)
    out, lse = out.to(case.dtype), lse.float()
    out[:, :256], lse[:, :, :256] = junk, junk
    last = tuple(t[:, -256:] for t in inputs)
    square = Case((1, 256, 2, 64), (1, 256, 1, 64), causal=True)
    for strategy in accepted_strategies(case):
        dq, dk, dv = backward(case, inputs, out, lse, strategy=strategy)
        assert not dq[:, :256].any()
        if strategy not in accepted_strategies(square):
            continue
        wanted = backward(square, last, out[:, 256:], lse[:, :, 256:], strategy=strategy)
        for got, want in zip((dq[:, 256:], dk, dv), wanted, strict=True):
            assert torch.equal(got, want), strategy


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (384, 256), (640, 128)],
)
def test_unequal_lengths(seqlen_q, seqlen_k, kv_heads, causal) -> None:
    """CASES 5, the small ones."""
    check_all_strategies(Case((1, seqlen_q, 6, 64), (1, seqlen_k, kv_heads, 64), causal))


@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 129, 191, 193])
def test_tails_leave_their_neighbours_alone(seqlen) -> None:
    """CASES 6: every head right where rows between heads and batches hold NaN."""
    case = Case((2, seqlen, 3, 64), (2, seqlen, 3, 64), causal=True)

    def guarded(t: torch.Tensor) -> torch.Tensor:
        store = torch.full((t.shape[0], t.shape[1] + 2, t.shape[2] + 1, t.shape[3]), torch.nan)
        view = store.to(t.dtype)[:, 1:-1, :-1]
        return view.copy_(t)

    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, True, torch.float64)
    out, lse = out.to(case.dtype), lse.float()
    wanted = backward(case, inputs, out, lse)
    got = backward(case, tuple(guarded(t) for t in inputs), guarded(out), lse)
    for x, want in zip(got, wanted, strict=True):
        assert torch.equal(x, want)


def test_lse_of_a_dead_row_hides_the_row() -> None:
    """±inf in lse marks a row without keys under any mask."""
    case = Case((1, 130, 1, 64), (1, 130, 1, 64))
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, False, torch.float64)
    without = inputs[3].clone()
    without[:, 5], without[:, 77] = 0, 0
    wanted = backward(case, (*inputs[:3], without), out, lse)
    out[:, 5], out[:, 77], lse[..., 5], lse[..., 77] = torch.nan, torch.inf, torch.inf, -torch.inf
    dq, dk, dv = backward(case, inputs, out, lse)
    assert not dq[:, [5, 77]].any()
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        assert torch.equal(got, want)


# ---- Order. With q = 0 (or k = 0) all scores are 0, and lse = 0 makes P exactly 1: every product
# is a power of two, exact in bf16 and fp32, and only the order of the sums is left to show.


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
        order_revealing(problem.kv_tiles, case.q_shape[3], seed) for seed in range(problem.kv_heads)
    ]
    q, out, dout = torch.zeros(3, *case.q_shape, dtype=case.dtype)
    k, v = torch.zeros(2, *case.kv_shape, dtype=case.dtype)
    dout[..., 0], v[..., 0] = 1, 1
    for kv_head in range(problem.kv_heads):  # one key a tile, its first
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
        for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
            assert torch.equal(dq[0, row, head], wanted), (q_tile, head)


@pytest.mark.parametrize(("case", "strategy"), by_strategy(ORDER_CASES))
def test_dk_and_dv_are_summed_in_visit_order_heads_innermost(case, strategy) -> None:
    problem = problem_of(case)
    group, shape = problem.group, case.q_shape
    # Heads are part of the order: a trial is one column over (q tile, head of the group).
    terms = [
        order_revealing(problem.q_tiles * group, shape[3], seed).unflatten(0, (-1, group))
        for seed in range(problem.kv_heads)
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


@pytest.mark.parametrize("causal", [False, True])
def test_repeats_and_batches_are_bitwise_equal(causal) -> None:
    case = Case((3, 300, 4, 64), (3, 400, 2, 64), causal)
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, causal, torch.float64)
    for strategy in accepted_strategies(case):
        first = backward(case, inputs, out, lse, strategy=strategy)
        again = backward(case, inputs, out, lse, strategy=strategy)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        one = tuple(t[1:2] for t in inputs)
        alone = backward(case, one, out[1:2], lse[1:2], strategy=strategy)
        assert all(torch.equal(a[1:2], b) for a, b in zip(first, alone, strict=True)), strategy


def test_the_cpu_walks_the_strategy_it_was_given() -> None:
    """Strategies with different orders give different bits on ordinary inputs."""
    case = Case((1, 1024, 2, 64), (1, 1024, 2, 64), causal=True)
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, True, torch.float64)
    names = ("ascending", "spt")
    first, second = (backward(case, inputs, out, lse, strategy=name) for name in names)
    assert dash.plan(*case[:2], case.dtype, causal=True, strategy="spt").strategy == "spt"
    assert not torch.equal(first[0], second[0])
