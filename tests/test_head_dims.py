"""v of another head dimension than q and k, and q and k beyond 128: what needs no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpu_cases import (
    Case,
    accepted_strategies,
    assert_accurate,
    backward,
    gradients,
    problem_of,
    random_inputs,
)
from op_calls import call
from packs import PackShape, assert_bits_of_dense, random_pack

import dash
from dash import _C, forward, ops
from dash.flops import _attention_bwd_flops, _attention_fwd_flops
from dash.head_dims import why_not_cudnn, why_not_fa3, with_one_head_dim

BF16 = torch.bfloat16
DIMS = ((136, 64), (192, 128), (64, 128), (128, 72), (40, 8))


def shapes_of(dims: tuple[int, int], seqlen_q: int = 200, seqlen_k: int = 333) -> dict[str, tuple]:
    return {"q_shape": (1, seqlen_q, 4, dims[0]), "kv_shape": (1, seqlen_k, 2, dims[0])}


# ---- Buckets, plans and fingerprints -------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "bucket", "tiles"),
    [
        ((8, 8), (64, 64), (128, 128)),
        ((64, 72), (128, 128), (64, 128)),
        ((72, 64), (128, 128), (64, 128)),
        ((128, 128), (128, 128), (64, 128)),
        ((136, 8), (192, 128), (64, 128)),
        ((192, 128), (192, 128), (64, 128)),
    ],
)
def test_the_bucket_holds_both(dims, bucket, tiles) -> None:
    assert _C.head_dim_bucket(*dims) == bucket
    assert _C.tile_shape(*dims) == tiles
    p = dash.plan(**shapes_of(dims), dtype=BF16, causal=True, head_dim_v=dims[1])
    assert p.tile_shape == tiles
    assert p.head_dim_v == dims[1]
    in_tiles = p.problem.in_tiles(p.group_split)
    assert p.workspace_bytes == _C.workspace_bytes(in_tiles, *dims)
    assert p.predicted_over_ideal > 1.0


def test_the_workspace_grows_with_q_and_k_alone() -> None:
    """fp32 sums of dQ have the head dimension of q; only parts of dV have that of v."""
    sizes = {}
    for qk, v in ((128, 64), (128, 128), (192, 128)):
        case = Case((1, 4096, 2, qk), (1, 4096, 2, qk), head_dim_v=v)
        sizes[qk, v] = _C.workspace_bytes(problem_of(case), qk, v)
    assert sizes[128, 64] == sizes[128, 128]
    assert sizes[192, 128] - sizes[128, 128] == 4096 * 2 * 64 * 4


def test_a_head_dim_v_that_is_head_dim_is_none() -> None:
    shapes = shapes_of((128, 128))
    given = dash.plan(**shapes, dtype=BF16, causal=True, head_dim_v=128)
    assert given == dash.plan(**shapes, dtype=BF16, causal=True)
    assert "head_dim_v" not in str(given)


def test_known_fingerprints_stay() -> None:
    """From before v could differ: a log of then names the same order now."""
    known = {((2, 512, 8, 64), (2, 512, 2, 64), True): "dd09a58e0dd77d15",
             ((1, 1000, 4, 128), (1, 700, 4, 128), False): "c26002b249981d1a"}  # fmt: skip
    for (q_shape, kv_shape, causal), digest in known.items():
        assert dash.plan(q_shape, kv_shape, BF16, causal=causal).fingerprint == digest


def test_head_dim_v_is_in_the_fingerprint() -> None:
    plans = [
        dash.plan(**shapes_of((128, 128)), dtype=BF16, causal=True, head_dim_v=v)
        for v in (None, 64, 72)
    ]
    assert len({p.fingerprint for p in plans}) == 3
    assert "head_dim_v 72" in str(plans[2])
    lengths = {"seqlens_q": [70, 130], "causal": True}
    shapes = (200, 4, 192), (200, 2, 192)
    packed = [dash.plan(*shapes, BF16, head_dim_v=v, **lengths) for v in (96, 128)]
    assert packed[0].fingerprint != packed[1].fingerprint
    assert "head_dim_v 96" in str(packed[0])


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((256, 256), "q has head_dim 256; required: a multiple of 8 from 8 to 192"),
        ((192, 192), "v has head_dim_v 192; required: a multiple of 8 from 8 to 128"),
        ((200, 128), "q has head_dim 200; required: a multiple of 8 from 8 to 192"),
        ((192, 100), "v has head_dim_v 100; required: a multiple of 8 from 8 to 128"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(dims, message) -> None:
    q, k = torch.zeros(1, 16, 4, dims[0], dtype=BF16), torch.zeros(1, 16, 2, dims[0], dtype=BF16)
    v = k.new_zeros(1, 16, 2, dims[1])
    cu_seqlens = torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention(q, k, v)
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention_varlen(q[0], k[0], v[0], cu_seqlens)
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.plan(**shapes_of(dims), dtype=BF16, causal=True, head_dim_v=dims[1])


@pytest.mark.parametrize("head_dim_v", [60.5, "64", 0, -8])
def test_a_head_dim_v_that_is_no_size_is_refused(head_dim_v) -> None:
    with pytest.raises(dash.UnsupportedError, match=f"v has head_dim_v {head_dim_v}; required"):
        dash.plan(**shapes_of((64, 64)), dtype=BF16, causal=True, head_dim_v=head_dim_v)


def test_out_and_dout_have_the_head_dim_of_v() -> None:
    tensors = call(head_dim=64)
    tensors["v"] = tensors["v"][..., :32]
    with pytest.raises(dash.UnsupportedError, match="but with the head_dim of v") as error:
        torch.ops.dash.attention_bwd(**tensors)
    assert [reason.split()[0] for reason in error.value.reasons] == ["dout", "out"]


# ---- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_every_strategy_is_accurate(dims, causal) -> None:
    case = Case(*shapes_of(dims).values(), causal, BF16, dims[1])
    inputs = random_inputs(case)
    out, lse, exact = gradients(inputs, causal, torch.float64)
    plain = gradients(inputs, causal, BF16)[2]
    for strategy in accepted_strategies(case):
        got = backward(case, inputs, out, lse, strategy=strategy)
        assert [g.shape for g in got] == [t.shape for t in inputs[:3]]
        assert_accurate(got, exact, plain)
        again = backward(case, inputs, out, lse, strategy=strategy)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_split_groups_are_accurate() -> None:
    case = Case(*shapes_of((192, 96)).values(), True, BF16, 96)
    inputs = random_inputs(case)
    out, lse, exact = gradients(inputs, True, torch.float64)
    plain = gradients(inputs, True, BF16)[2]
    assert_accurate(backward(case, inputs, out, lse, group_split=2), exact, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_attention_differentiates(dims, causal) -> None:
    case = Case(*shapes_of(dims).values(), causal, BF16, dims[1])
    q, k, v, dout = random_inputs(case)
    plain_out, _, exact = gradients((q, k, v, dout), causal, torch.float64)
    plain = gradients((q, k, v, dout), causal, BF16)[2]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = dash.attention(*leaves, causal=causal, return_lse=True)
    assert out.shape == dout.shape
    assert lse.shape == (1, 4, 200)
    torch.testing.assert_close(out.double(), plain_out, atol=2e-2, rtol=2e-2)
    assert_accurate(torch.autograd.grad(out, leaves, dout), exact, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_a_pack_has_the_bits_of_its_sequences_alone(dims, causal) -> None:
    lengths = ((70, 70), (0, 0), (1, 130), (129, 65))
    shape = PackShape(lengths, 4, 2, dims[0], causal, gaps=(3, 0), tails=(2, 5), head_dim_v=dims[1])
    pack = random_pack(shape)
    assert_bits_of_dense(pack, pack.gradients())
    q, k, v = (pack.tensors[name].nan_to_num() for name in "qkv")
    cu_seqlens = [pack.lengths[f"cu_seqlens_{side}"] for side in "qk"]
    out = dash.attention_varlen(q, k, v, *cu_seqlens, causal=causal)
    assert out.shape == pack.tensors["out"].shape


@pytest.mark.parametrize("dims", [(192, 128), (64, 128)])
def test_operators_pass_the_checks_of_pytorch(dims) -> None:
    """Schema, autograd registration, fake tensors and AOT dispatch."""
    case = Case((1, 40, 2, dims[0]), (1, 50, 1, dims[0]), True, BF16, dims[1])
    q, k, v, _ = (t.requires_grad_() for t in random_inputs(case))
    torch.library.opcheck(torch.ops.dash.attention_fwd.default, (q, k, v, None, True))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (40, 50))
    packed = (*(t.detach()[0].requires_grad_() for t in (q, k, v)), cu_q, cu_k)
    torch.library.opcheck(torch.ops.dash.attention_varlen_fwd.default, packed)


def test_empty_problems_give_zeros() -> None:
    q, k = torch.zeros(1, 16, 4, 192, dtype=BF16), torch.zeros(1, 0, 2, 192, dtype=BF16)
    leaves = [t.requires_grad_() for t in (q, k, k.new_zeros(1, 0, 2, 128))]
    out = dash.attention(*leaves)
    assert out.shape == (1, 16, 4, 128)
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), leaves)[0].any()


def test_flops_are_those_of_each_product() -> None:
    q, k, v = (1, 10, 4, 192), (1, 20, 2, 192), (1, 20, 2, 128)
    pairs = 2 * 4 * 10 * 20
    assert _attention_fwd_flops(q, k, v) == pairs * (192 + 128)
    assert _attention_bwd_flops(q, q, k, v) == pairs * (3 * 192 + 2 * 128)


# ---- Forwards of others --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "fa3", "cudnn"),
    [
        ((128, 128), True, True),
        ((192, 128), True, True),
        ((136, 104), True, False),
        ((192, 96), False, False),
        ((64, 128), True, False),
        ((128, 64), False, False),
    ],
)
def test_forwards_are_asked_for_what_they_know(dims, fa3, cudnn) -> None:
    assert (why_not_fa3((BF16, *dims)) is None) == fa3
    assert (why_not_cudnn((BF16, *dims)) is None) == cudnn


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (64, 64)])
def test_columns_of_zeros_change_nothing(dims) -> None:
    """What FlashAttention-2 gets: out is in the first columns, and lse is the same."""
    case = Case((1, 30, 4, dims[0]), (1, 40, 2, dims[0]), True, BF16, dims[1])
    q, k, v, _ = random_inputs(case)
    padded = with_one_head_dim(q, k, v)
    assert {t.shape[3] for t in padded} == {max(dims)}
    scale = dims[0] ** -0.5
    out, lse = forward.plain_forward(q, k, v, scale, True)
    wide, same_lse = forward.plain_forward(*padded, scale, True)
    torch.testing.assert_close(wide[..., : dims[1]], out)
    torch.testing.assert_close(lse, same_lse)
    assert not wide[..., dims[1] :].any()


# ---- The call of the kernels ---------------------------------------------------------------------


def test_the_cuda_call_has_the_strides_of_each_tensor(monkeypatch) -> None:
    called = []

    class Recorder:
        @staticmethod
        def backward(*arguments: object) -> None:
            called[:] = arguments

    monkeypatch.setattr(ops, "extension", lambda: Recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(ops, "_launches", {})
    case = Case((2, 96, 4, 192), (2, 160, 2, 192), True, BF16, 128)
    q, k, v, dout = random_inputs(case)
    grads = ops._attention_bwd_cuda(dout, q, k, v, dout, torch.zeros(2, 4, 96), None, True)
    assert called[3:5] == [192, 192**-0.5]
    assert called[-1] == 128
    views = (q, k, v, dout, dout)
    assert called[5:10] == [(t.data_ptr(), *t.stride()[:3]) for t in views]
    assert called[11:14] == [(t.data_ptr(), *t.stride()[:3]) for t in grads]
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]


def test_every_pair_of_multiples_of_eight_has_a_bucket() -> None:
    for head_dim, of_v in itertools.product(range(8, 193, 8), range(8, 129, 8)):
        qk, v = _C.head_dim_bucket(head_dim, of_v)
        assert qk >= head_dim
        assert v >= of_v
    for dims in ((200, 8), (8, 136), (12, 8), (8, 12)):
        with pytest.raises(ValueError, match="wanted a multiple of 8"):
            _C.head_dim_bucket(*dims)
