"""Windows through dash.attention, the operator and the plan, on the CPU.

Schedules under windows are in test_schedules.py and test_mask.py, packed ones in test_varlen.py.
"""

from __future__ import annotations

import pytest
import torch
from cpu_cases import assert_accurate
from op_calls import assert_same_bits, attention_and_gradients, backward, call, qkv, randn

import dash
from dash import _C
from dash.forward import plain_forward

BFLOAT16 = torch.bfloat16
WINDOWS = [(0, 0), (20, None), (None, 20), (64, 0), (127, 128), (300, 5)]
LENGTHS = [(96, 160), (300, 300), (150, 131), (1, 200)]


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple) -> torch.Tensor:
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    column = torch.arange(seqlen_k)[None]
    left, right = window
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    seen &= column <= place if causal else seen
    seen &= column >= place - left if left is not None else seen
    return seen & (column <= place + right) if right is not None else seen


def gradients(tensors: list[torch.Tensor], seen: torch.Tensor, dtype: torch.dtype) -> list:
    """out, dq, dk, dv of a sum, by autograd in ``dtype``."""
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors)
    group = q.shape[2] // k.shape[2]
    keys, values = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = (q.transpose(1, 2) * q.shape[3] ** -0.5) @ keys.mT
    lowest = torch.finfo(dtype).min
    p = scores.masked_fill(~seen, lowest).softmax(-1).masked_fill(~seen, 0.0)
    out = (p @ values).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_match_fp64(lengths, window, causal) -> None:
    tensors = qkv(seqlen_q=lengths[0], seqlen_k=lengths[1])
    left, right = window
    out, *got = attention_and_gradients(
        tensors, causal=causal, window_left=left, window_right=right
    )
    seen = visible(*lengths, causal, window)
    wanted, *exact = gradients(tensors, seen, torch.float64)
    _, *plain = gradients(tensors, seen, BFLOAT16)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-2)
    assert_accurate(got, exact, plain)
    keyless = ~seen.any(1)
    assert not out[:, keyless].any()
    assert not got[0][:, keyless].any()
    unseen = ~seen.any(0)
    assert not got[1][:, unseen].any()
    assert not got[2][:, unseen].any()


@pytest.mark.parametrize("strategy", _C.strategies())
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_every_strategy_that_may_run_is_exact_and_repeats(strategy, kv_heads) -> None:
    shape, kv_shape = (1, 400, 4, 64), (1, 400, kv_heads, 64)
    more = {"causal": True, "window_left": 130}
    arguments = (shape, kv_shape, BFLOAT16)
    if strategy in ("shift", "symmetric_shift"):
        with pytest.raises(dash.UnsupportedError, match="got a window"):
            dash.plan(*arguments, strategy=strategy, device="cpu", **more)
        return
    plan = dash.plan(*arguments, strategy=strategy, device="cpu", **more)
    assert plan.strategy == strategy
    tensors = qkv(batch=1, seqlen_q=400, seqlen_k=400, kv_heads=kv_heads)
    _, *got = attention_and_gradients(tensors, strategy=strategy, **more)
    _, *again = attention_and_gradients(tensors, strategy=strategy, **more)
    assert_same_bits(got, again)
    seen = visible(400, 400, True, (130, None))
    exact, plain = (gradients(tensors, seen, dtype)[1:] for dtype in (torch.float64, BFLOAT16))
    assert_accurate(got, exact, plain)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_that_hides_nothing_is_none(causal) -> None:
    """Its order, fingerprint and bits are those of the problem without it."""
    tensors = qkv(seqlen_q=150, seqlen_k=300)
    wanted = attention_and_gradients(tensors, causal=causal)
    shapes = tensors[0].shape, tensors[1].shape, BFLOAT16
    without = dash.plan(*shapes, causal=causal, device="cpu")
    for left, right in ((299, None), (None, 149), (2**40, 2**40)):
        more = {"causal": causal, "window_left": left, "window_right": right}
        got = attention_and_gradients(tensors, **more)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        plan = dash.plan(*shapes, device="cpu", **more)
        assert (plan.strategy, plan.fingerprint) == (without.strategy, without.fingerprint)
    bites = dash.plan(*shapes, causal=causal, window_left=298, device="cpu")
    assert bites.fingerprint != without.fingerprint


def test_no_keys_to_the_right_is_the_causal_mask() -> None:
    tensors = qkv(seqlen_q=200, seqlen_k=200)
    causal = attention_and_gradients(tensors, causal=True)
    window = attention_and_gradients(tensors, window_right=0)
    both = attention_and_gradients(tensors, causal=True, window_right=50)
    for got in (window, both):
        assert all(torch.equal(a, b) for a, b in zip(got, causal, strict=True))
    shapes = tensors[0].shape, tensors[1].shape, BFLOAT16
    prints = {
        dash.plan(*shapes, device="cpu", **more).fingerprint
        for more in ({"causal": True}, {"causal": False, "window_right": 0})
    }
    assert len(prints) == 1


def test_a_short_sequence_does_not_notice_a_window() -> None:
    """CASES 32: lengths of 100 with window_left 1,024 have the bits of the causal call."""
    tensors = qkv(seqlen_q=100, seqlen_k=100)
    got = attention_and_gradients(tensors, causal=True, window_left=1024)
    wanted = attention_and_gradients(tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_the_operator_takes_windows_by_position_and_its_bits_do_not_depend_on_the_batch() -> None:
    q, k, v = qkv(batch=3, seqlen_q=300, seqlen_k=300)
    out, lse = plain_forward(q, k, v, 0.125, False, 40, 10)
    tensors = {"dout": randn(3, 300, 4, 64, seed=9), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    got = backward(tensors, None, False, "auto", 0, 40, 10)
    named = backward(tensors, window_left=40, window_right=10)
    assert_same_bits(named, got)
    alone = backward({name: t[1:2] for name, t in tensors.items()}, None, False, "auto", 0, 40, 10)
    assert_same_bits([g[1:2] for g in got], alone)


@pytest.mark.parametrize("more", [{"window_left": 30}, {"window_left": 5, "window_right": 9}])
def test_opcheck_and_compile(more) -> None:
    tensors = call()
    torch.library.opcheck(torch.ops.dash.attention_bwd, tuple(tensors.values()), more)
    q, k, v = (t.requires_grad_() for t in qkv())

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return dash.attention(*inputs, **more).float().square().sum()

    eager = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"causal": False}, "full"),
        ({"causal": True}, "causal, bottom-right"),
        ({"causal": True, "window_left": 1024}, "window of 1,024 keys before and 0 after"),
        ({"causal": False, "window_right": 7}, "window of all keys before and 7 after"),
    ],
)
def test_a_plan_says_the_window(more, words) -> None:
    shape = (1, 4096, 8, 128)
    text = str(dash.plan(shape, shape, BFLOAT16, device="cpu", **more)).splitlines()[0]
    assert words in text
