"""The CPU implementation against fp64 autograd, and that it repeats itself bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_cases import (
    Case,
    accepted_strategies,
    assert_accurate,
    backward,
    gradients,
    random_inputs,
)

import dash


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small products: threads cost more than they bring, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
def test_all_ones(causal) -> None:
    """CASES 1: all scores are equal, so dQ = dK = 0 exactly and dV counts rows over their keys."""
    case = Case((4, 16, 32, 64), (4, 16, 32, 64), causal, torch.float16)
    ones = torch.ones(case.q_shape, dtype=case.dtype)
    keys = torch.arange(1, 17, dtype=torch.float64) if causal else torch.full((16,), 16.0).double()
    lse = (64 + keys.log()).expand(4, 32, 16)
    dq, dk, dv = backward(case, (ones, ones, ones, ones), ones, lse, softmax_scale=1.0)
    assert not dq.any()
    assert not dk.any()
    wanted = (1 / keys).flip(0).cumsum(0).flip(0) if causal else torch.ones(16)
    wanted = wanted.to(case.dtype)[None, :, None, None].expand_as(dv)
    torch.testing.assert_close(dv, wanted, rtol=2e-3, atol=0)


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


@pytest.mark.parametrize("lse_of_nothing", [torch.nan, 3.0, torch.inf, -torch.inf])
def test_the_mask_decides_which_rows_have_keys(lse_of_nothing) -> None:
    """CASES 20: nothing that a row without keys holds is read for its value."""
    case = Case((1, 131, 2, 64), (1, 128, 1, 64), causal=True)
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, True, torch.float64)
    wanted = backward(case, inputs, out, lse)
    q, k, v, dout = (t.clone() for t in inputs)
    for tensor in (q, dout, out):
        tensor[:, :3] = torch.nan
    lse[..., :3] = lse_of_nothing
    got = backward(case, (q, k, v, dout), out, lse)
    assert not got[0][:, :3].any()
    for x, want in zip(got, wanted, strict=True):
        assert torch.equal(x, want)


@pytest.mark.parametrize("lse_of_overflow", [torch.inf, -torch.inf, torch.nan])
def test_overflow_in_a_row_with_keys_shows_in_the_gradients(lse_of_overflow) -> None:
    """CASES 27: a loss scaler must see it; ±inf in lse is no sign of a row without keys."""
    case = Case((1, 130, 1, 64), (1, 130, 1, 64))
    inputs = random_inputs(case)
    out, lse, _ = gradients(inputs, False, torch.float64)
    out[:, 5], lse[..., 5] = torch.nan, lse_of_overflow
    dq, dk, _ = backward(case, inputs, out, lse)
    assert not dq[:, 5].isfinite().any()
    assert dq[:, [4, 6]].isfinite().all()
    assert not dk.isfinite().any()


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
