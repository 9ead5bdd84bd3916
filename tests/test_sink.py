"""Attention sinks and the gradient of lse, dense and packed, against fp64."""

from __future__ import annotations

import pytest
import torch
from op_calls import qkv, randn

import dash
from dash.sink import tree_sum

ARGUMENTS = ("q", "k", "v", "sink")


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    mask: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64, differentiable; a sink is one more column of scores."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat((scores, column), -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (p @ v).transpose(1, 2), scores.masked_fill(dead, 0.0).logsumexp(-1)


def visible(seqlen_q: int, seqlen_k: int, causal: bool, left: int | None) -> torch.Tensor:
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    column = torch.arange(seqlen_k)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask &= column <= place if causal else mask
    return mask if left is None else mask & (column >= place - left)


def weights(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(*out.shape, seed=11).double(), randn(*lse.shape, seed=12).double()


@pytest.mark.parametrize("of", ["out", "lse", "both"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(
    ("lengths", "causal", "left"),
    [
        ((96, 160), False, None),
        ((96, 160), True, None),
        ((70, 70), True, 20),
        ((150, 130), True, 9),
    ],
)
def test_gradients_match_fp64(lengths, causal, left, with_sink, of) -> None:
    seqlen_q, seqlen_k = lengths
    tensors = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    if with_sink:
        tensors.append(torch.linspace(-2, 3, 4))
    tensors = [t.requires_grad_() for t in tensors]
    q, k, v, *sink = tensors
    out, lse = dash.attention(
        q, k, v, causal=causal, window_left=left, sink=sink[0] if sink else None, return_lse=True
    )
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    mask = visible(seqlen_q, seqlen_k, causal, left)
    wanted_out, wanted_lse = exact(*doubles[:3], doubles[3] if sink else None, mask, 0.125)
    hidden = max(0, seqlen_q - seqlen_k) if causal else 0
    seen = slice(0 if with_sink else hidden, None)
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse[..., seen].double(), wanted_lse[..., seen], rtol=0, atol=1e-4)
    of_out, of_lse = weights(out, lse)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        terms = {
            "out": (out.double() * of_out).sum(),
            "lse": (lse.double() * of_lse)[..., seen].sum(),
        }
        return terms["out"] + terms["lse"] if of == "both" else terms[of]

    grads = torch.autograd.grad(loss(out, lse), tensors)
    references = torch.autograd.grad(loss(wanted_out, wanted_lse), doubles, materialize_grads=True)
    for name, grad, reference in zip(ARGUMENTS, grads, references, strict=False):
        assert grad.dtype == (torch.float32 if name == "sink" else torch.bfloat16)
        error = (grad.double() - reference).norm()
        allowed = 1e-2 * reference.norm() + 1e-6
        if name == "sink":  # its terms cancel: out's rounding to bfloat16 counts, not their sum
            share = torch.exp(doubles[3][:, None] - wanted_lse)
            rounded = (of_out * wanted_out).abs().sum(-1).transpose(1, 2)
            allowed += 2**-8 * (share * rounded).sum((0, 2)).norm()
        assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


def test_one_key_by_hand() -> None:
    """q = k = 1, v = 2, sink 0, dO = 1: shared/BREADTH.md §4."""
    unit = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    unit[..., 0] = 1
    q, k, v = unit.clone(), unit.clone(), 2 * unit
    sink = torch.zeros(1)
    tensors = [t.requires_grad_() for t in (q, k, v, sink)]
    out = dash.attention(q, k, v, sink=sink, softmax_scale=1.0)
    dq, dk, dv, dsink = torch.autograd.grad(out, tensors, unit)
    for grad, wanted in ((dq, 0.3932239), (dk, 0.3932239), (dv, 0.7310586), (dsink, -0.3932239)):
        assert grad.flatten()[0].item() == pytest.approx(wanted, abs=1e-3)
        assert not grad.flatten()[1:].any()


def test_a_sink_of_minus_infinity_is_none() -> None:
    tensors = [t.requires_grad_() for t in qkv(seqlen_q=140, seqlen_k=130)]
    sink = torch.full((4,), -torch.inf, requires_grad=True)
    with_sink = dash.attention(*tensors, causal=True, sink=sink)
    without = dash.attention(*tensors, causal=True)
    assert torch.equal(with_sink, without)
    *grads, dsink = torch.autograd.grad(with_sink.sum(), (*tensors, sink))
    wanted = torch.autograd.grad(without.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    assert not dsink.any()


def test_rows_without_keys_are_not_read_for_the_sinks_gradient() -> None:
    tensors = qkv(seqlen_q=140, seqlen_k=130)
    sink = torch.ones(4, requires_grad=True)
    dout = randn(2, 140, 4, 64, seed=5)
    out = dash.attention(*tensors, causal=True, sink=sink)
    (wanted,) = torch.autograd.grad(out, sink, dout, retain_graph=True)
    poisoned = dout.clone()
    poisoned[:, :10] = torch.nan
    assert torch.equal(torch.autograd.grad(out, sink, poisoned)[0], wanted)


@pytest.mark.parametrize("of", ["out", "both"])
@pytest.mark.parametrize(("causal", "left"), [(False, None), (True, None), (True, 16)])
def test_packed_sequences_have_the_bits_of_dense_ones(causal, left, of) -> None:
    lengths, tail = (40, 0, 100, 7), 5
    total = sum(lengths) + tail
    starts = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
    q = randn(total, 4, 64, seed=1)
    k, v = (randn(total, 2, 64, seed=s) for s in (2, 3))
    q[-tail:], k[-tail:], v[-tail:] = torch.nan, torch.nan, torch.nan
    sink = torch.linspace(-1, 1, 4)
    dout, dlse = randn(total, 4, 64, seed=4), randn(4, total, seed=5).float()
    dout[-tail:], dlse[:, -tail:] = torch.nan, torch.nan
    more = {"causal": causal, "window_left": left, "return_lse": True}
    parts = 1 if of == "out" else 2
    packed = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    outputs = dash.attention_varlen(*packed[:3], starts, sink=packed[3], **more)
    got = torch.autograd.grad(outputs[:parts], packed, (dout, dlse)[:parts])
    assert not any(g[-tail:].any() for g in got[:3])
    dsink = torch.zeros(4, dtype=torch.float64)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        if length == 0:
            continue
        rows = slice(start, start + length)
        one = [t[None, rows].clone().requires_grad_() for t in (q, k, v)]
        one.append(sink.clone().requires_grad_())
        dense = dash.attention(*one[:3], sink=one[3], **more)
        assert torch.equal(outputs[0][rows], dense[0][0])
        assert torch.equal(outputs[1][:, rows], dense[1][0])
        grads = torch.autograd.grad(
            dense[:parts], one, (dout[None, rows], dlse[None, :, rows])[:parts]
        )
        for x, want in zip(got[:3], grads[:3], strict=True):
            assert torch.equal(x[rows], want[0])
        dsink += grads[3].double()
    torch.testing.assert_close(got[3].double(), dsink, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_and_compile(dtype) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    sink = torch.ones(4, dtype=dtype, requires_grad=True)
    out, lse = dash.attention(q, k, v, sink=sink, return_lse=True)
    arguments = (randn(2, 96, 4, 64, seed=6), out.detach(), lse.detach(), sink.detach())
    torch.library.opcheck(torch.ops.dash.attention_sink_bwd, arguments)
    torch.library.opcheck(torch.ops.dash.attention_sink_bwd, (*arguments, lse.detach()))

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        out, lse = dash.attention(*tensors[:3], sink=tensors[3], causal=True, return_lse=True)
        return out.float().square().sum() + lse.sum()

    eager = torch.autograd.grad(loss(q, k, v, sink), (q, k, v, sink))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink))
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))
    assert eager[3].dtype == dtype
    detached = [t.detach() for t in (q, k, v, sink)]
    functional = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*detached)
    assert all(torch.equal(a, b) for a, b in zip(functional, eager, strict=True))


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (torch.zeros(3), r"sink has shape \(3,\); required: \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), "sink has dtype torch.int32; required: a floating"),
    ],
)
def test_a_wrong_sink_is_refused_by_name(sink, message) -> None:
    q, k, v = qkv()
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention(q, k, v, sink=sink)
    cu_seqlens = torch.tensor([0, 96], dtype=torch.int32)
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention_varlen(q[0], k[0, :96], v[0, :96], cu_seqlens, sink=sink)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 1000])
def test_the_tree_adds_each_term_once_and_in_its_order(n) -> None:
    assert torch.equal(tree_sum(torch.ones(2, n)), torch.full((2,), float(n)))

    def by_hand(terms: list[torch.Tensor]) -> torch.Tensor:
        if len(terms) == 1:
            return terms[0]
        half = len(terms) // 2
        pairs = [a + b for a, b in zip(terms[:half], terms[half : 2 * half], strict=True)]
        return by_hand(pairs + terms[2 * half :])

    if n:
        terms = randn(n, seed=n).float().exp()
        assert torch.equal(tree_sum(terms), by_hand(list(terms)))
