"""Sinks and a gradient of lse in packed sequences: as the dense call on each sequence."""

from __future__ import annotations

import pytest
import torch
from packs import Pack, PackShape, all_same, random_pack, same_bits

import dash

LENGTHS = ((40, 40), (0, 7), (90, 70), (5, 0), (1, 1), (64, 130))
SHAPES = [
    PackShape(LENGTHS, 4, 2, 64, causal, left, gaps=gaps, tails=tails)
    for causal, left in ((False, None), (True, None), (True, 20))
    for gaps, tails in (((0, 0), (0, 0)), ((3, 2), (9, 4)))
]
SINK = torch.tensor([0.5, -1.0, 2.0, -torch.inf])


def leaves_of(pack: Pack) -> list[torch.Tensor]:
    return [pack.tensors[name].clone().requires_grad_() for name in "qkv"]


def dlse_of(pack: Pack) -> torch.Tensor:
    """A gradient of lse, NaN in rows of no sequence."""
    dlse = torch.randn(
        pack.tensors["softmax_lse"].shape, generator=torch.Generator().manual_seed(3)
    )
    dlse[:, pack.rows_of_none(0)] = torch.nan
    return dlse


def grads_of(asked: list[tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor]) -> tuple:
    """Gradients of results that are given with their own."""
    outputs, grad_outputs = zip(*asked, strict=True)
    return torch.autograd.grad(outputs, leaves, grad_outputs)


def with_keys(pack: Pack) -> list[int]:
    return [i for i, lengths in enumerate(pack.shape.lengths) if 0 not in lengths]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_of_lse_has_the_bits_of_the_dense_call(shape: PackShape) -> None:
    pack = random_pack(shape)
    dlse = dlse_of(pack)
    grads = pack.gradients(dlse=dlse)
    alone = list(pack.sequences_of(grads))
    for index in with_keys(pack):
        one = pack.alone(index)
        wanted = torch.ops.dash.attention_bwd(
            *one.values(), dlse=dlse[:, pack.rows(index, 0)][None], **shape.mask
        )
        assert all_same(alone[index], [g[0] for g in wanted])
    assert not all_same(grads, pack.gradients())
    for grad, side in zip(grads, (0, 1, 1), strict=True):
        assert not grad[pack.rows_of_none(side)].view(torch.int16).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_sinks_have_the_bits_of_the_dense_call(shape: PackShape, through: str) -> None:
    """Of out, lse, dq, dk and dv; the sink's gradient is the sum of the sequences'."""
    pack = random_pack(shape)
    leaves, sink = leaves_of(pack), SINK.clone().requires_grad_()
    dlse = dlse_of(pack)
    more = {"return_lse": True, **shape.mask}
    out, lse = dash.attention_varlen(*leaves, sink=sink, **more, **pack.lengths)
    results = {"out": (out, pack.tensors["dout"]), "lse": (lse, dlse)}
    asked = list(results.values()) if through == "both" else [results[through]]
    grads = grads_of(asked, [*leaves, sink])
    assert not out[pack.rows_of_none(0)].any()
    dsink = torch.zeros(4, dtype=torch.float64)
    parts = list(pack.sequences_of(grads[:3]))
    for index, (seqlen_q, _) in enumerate(shape.lengths):
        if seqlen_q == 0:
            continue
        rows = pack.rows(index, 0)
        one = pack.alone(index)
        alone = [one[name].clone().requires_grad_() for name in "qkv"]
        own = SINK.clone().requires_grad_()
        own_out, own_lse = dash.attention(*alone, sink=own, **more)
        assert same_bits(out[rows], own_out[0])
        torch.testing.assert_close(lse[:, rows], own_lse[0], rtol=0, atol=0)
        own_results = {"out": (own_out, one["dout"]), "lse": (own_lse, dlse[:, rows][None])}
        own_asked = list(own_results.values()) if through == "both" else [own_results[through]]
        *wanted, own_dsink = grads_of(own_asked, [*alone, own])
        assert all_same(parts[index], [g[0] for g in wanted])
        dsink += own_dsink.double()
    torch.testing.assert_close(grads[3].double(), dsink, rtol=1e-4, atol=1e-4)
    assert grads[3][3] == 0  # a sink of -inf is none
    for grad, side in zip(grads, (0, 1, 1), strict=False):
        assert not grad[pack.rows_of_none(side)].view(torch.int16).any()


def test_one_key() -> None:
    """BREADTH's check, twice in a pack: scale 1, q = k = 1, v = 2, sink 0, dO = 1, one column."""
    q = torch.zeros(2, 1, 8)
    q[..., 0] = 1
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, q, 2 * q))
    sink = torch.zeros(1, requires_grad=True)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    out = dash.attention_varlen(q, k, v, cu, softmax_scale=1.0, sink=sink)
    dq, dk, dv, dsink = torch.autograd.grad(out, (q, k, v, sink), (q > 0).to(q.dtype))
    for grad, wanted in ((dv, 0.7310586), (dq, 0.3932239), (dk, 0.3932239)):
        torch.testing.assert_close(
            grad[:, 0, 0].float(), torch.full((2,), wanted), rtol=5e-3, atol=0
        )
    assert abs(dsink.item() + 2 * 0.3932239) < 5e-3


def test_without_a_sink_lse_has_a_gradient_too() -> None:
    pack = random_pack(PackShape(((40, 40), (70, 70)), 4, 2))
    leaves = leaves_of(pack)
    _, lse = dash.attention_varlen(*leaves, return_lse=True, **pack.lengths)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    # dlse/dq is the mean of the keys under p, so it is the output of attention with v = k.
    mean = dash.attention_varlen(leaves[0], leaves[1], leaves[1], **pack.lengths) * 64**-0.5
    torch.testing.assert_close(dq.float(), mean.float(), rtol=3e-2, atol=3e-3)
    assert dk.any()
    assert not dv.any()


@pytest.mark.parametrize("lengths", [(), ((0, 9),), ((9, 0),)], ids=str)
def test_empty_packs(lengths) -> None:
    pack = random_pack(PackShape(lengths, 4, 2, causal=True, tails=(6, 5)))
    leaves, sink = leaves_of(pack), SINK.clone().requires_grad_()
    out, lse = dash.attention_varlen(
        *leaves, sink=sink, return_lse=True, causal=True, **pack.lengths
    )
    *grads, dsink = torch.autograd.grad(out, [*leaves, sink], pack.tensors["dout"])
    assert not out.any()
    assert not any(grad.any() for grad in grads)
    assert not dsink.any()
    rows = slice(0, 9 if lengths == ((9, 0),) else 0)
    assert torch.equal(lse[:, rows], SINK[:, None].expand(4, rows.stop))


WRONG = [
    (torch.zeros(3), r"sink has shape \(3,\); required: \(4,\)"),
    (torch.zeros(4, dtype=torch.int32), "sink has dtype torch.int32; required: a floating"),
]


@pytest.mark.parametrize(("sink", "message"), WRONG, ids=[m[:16] for _, m in WRONG])
def test_a_sink_is_checked(sink, message) -> None:
    pack = random_pack(SHAPES[0])
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention_varlen(*leaves_of(pack), sink=sink, **pack.lengths)


def test_opcheck_and_compile_with_a_sink() -> None:
    pack = random_pack(SHAPES[0])
    q, k, v = (t.detach().nan_to_num().requires_grad_() for t in leaves_of(pack))
    sink = torch.zeros(4, requires_grad=True)
    torch.library.opcheck(
        torch.ops.dash.attention_varlen_fwd, (q, k, v, *pack.lengths.values()), {"sink": sink}
    )

    def loss(q, k, v, sink):
        out, lse = dash.attention_varlen(q, k, v, sink=sink, return_lse=True, **pack.lengths)
        return out.float().square().sum() + lse.clamp(-9, 9).sum()

    wanted = torch.autograd.grad(loss(q, k, v, sink), (q, k, v, sink))
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink))
    assert all_same(got[:3], wanted[:3])
    assert torch.equal(got[3], wanted[3])
