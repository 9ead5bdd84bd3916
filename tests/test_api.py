"""The operator as PyTorch and its callers see it: schema, checks, empty problems."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from op_calls import backward, call, randn

import dash
from dash import _C, ops, support

# ---- What PyTorch checks -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"softmax_scale": 0.3}, {"strategy": "ascending"}])
def test_opcheck(causal, more) -> None:
    torch.library.opcheck(
        torch.ops.dash.attention_bwd, tuple(call().values()), {"causal": causal, **more}
    )


def test_opcheck_of_the_forward() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    torch.library.opcheck(torch.ops.dash.attention_fwd, (q, k, v, 0.125, True, "auto", 0))


def test_schema() -> None:
    schema = str(torch.ops.dash.attention_bwd.default._schema)
    assert schema == (
        "dash::attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
        'Tensor softmax_lse, float? softmax_scale=None, bool causal=False, str strategy="auto", '
        "int group_split=0, int? window_left=None, int? window_right=None, Tensor? dlse=None) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_are_contiguous_and_the_fake_says_so(transposed) -> None:
    tensors = call()
    if transposed:  # (batch, heads, seqlen, head_dim) in memory
        for name in ("dout", "q", "k", "v", "out"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    real = backward(tensors)
    fake = backward({name: t.to("meta") for name, t in tensors.items()})
    for got, imagined, like in zip(real, fake, "qkv", strict=True):
        assert got.is_contiguous()
        assert got.stride() == imagined.stride()
        assert got.shape == imagined.shape == tensors[like].shape
        assert got.dtype == imagined.dtype == tensors[like].dtype


def test_outputs_share_no_memory_with_inputs() -> None:
    tensors = call()
    before = {name: t.clone() for name, t in tensors.items()}
    grads = backward(tensors)
    owned = {t.untyped_storage().data_ptr() for t in (*tensors.values(), *grads)}
    assert len(owned) == len(tensors) + 3
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())


# ---- Errors: CASES 13 and every other sentence ---------------------------------------------------

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def replace(**new: torch.Tensor) -> Change:
    return lambda tensors: tensors | new


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors | {name: tensors[name].to(dtype)}


ERRORS = [
    (
        lambda t: {name: x.float() if x.dim() == 4 else x for name, x in t.items()},
        r"q has dtype torch.float32; required: torch.bfloat16 or torch.float16",
    ),
    (cast("v", torch.float32), r"v has dtype torch.float32; required: torch.bfloat16"),
    (cast("dout", torch.float16), r"dout has dtype torch.float16; required: torch.bfloat16"),
    (cast("out", torch.float32), r"out has dtype torch.float32; required: torch.bfloat16"),
    (replace(q=randn(96, 4, 64)), r"q has 3 dimensions, shape \(96, 4, 64\); required: 4"),
    (replace(k=randn(3, 160, 2, 64)), r"k has batch 3; required: 2, the batch of q"),
    (replace(k=randn(2, 160, 2, 32)), r"k has head_dim 32; required: 64, the head_dim of q"),
    (
        replace(v=randn(2, 161, 2, 64)),
        r"v has shape \(2, 161, 2, 64\); required: \(2, 160, 2, 64\)",
    ),
    (replace(dout=randn(2, 96, 2, 64)), r"dout has shape .* required: \(2, 96, 4, 64\)"),
    (replace(out=randn(2, 95, 4, 64)), r"out has shape .* required: \(2, 96, 4, 64\)"),
    (cast("softmax_lse", torch.float16), r"softmax_lse has dtype torch.float16; required: .*32"),
    (
        replace(softmax_lse=torch.zeros(2, 96, 4)),
        r"softmax_lse has shape \(2, 96, 4\); required: .* \(2, 4, 96\), or \(2, 4, 96, 1\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:24] for _, m in ERRORS])
def test_error_names_argument_given_and_required(change, message) -> None:
    with pytest.raises(dash.UnsupportedError, match=message):
        backward(change(call()))


def test_device_errors() -> None:
    q, k, v = (call()[name] for name in "qkv")
    assert support.reasons(q, k.to("meta"), v) == ["k is on meta; required: cpu, the device of q"]
    on_meta = support.reasons(q.to("meta"), k.to("meta"), v.to("meta"))
    assert on_meta[0].startswith("q is on meta; required: a CUDA device of compute capability 9.0")


@pytest.mark.parametrize("head_dim", [4, 100, 200, 256])
def test_head_dim_error(head_dim) -> None:
    message = f"q has head_dim {head_dim}; required: a multiple of 8 from 8 to 192"
    with pytest.raises(dash.UnsupportedError, match=message):
        backward(call(head_dim=head_dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (2, 4), (4, 3)])
def test_head_count_error(heads, kv_heads) -> None:
    q, kv = randn(1, 8, heads, 64), randn(1, 8, kv_heads, 64)
    message = f"q has {heads} heads and k has {kv_heads} kv_heads; required: heads a multiple"
    with pytest.raises(dash.UnsupportedError, match=message):
        torch.ops.dash.attention_bwd(q, q, kv, kv, q, torch.zeros(1, heads, 8))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_softmax_scale_error(scale) -> None:
    with pytest.raises(dash.UnsupportedError, match=r"softmax_scale is .*; required: a finite"):
        backward(call(), softmax_scale=scale)


def test_unknown_strategy_error() -> None:
    known = ", ".join(map(repr, ("auto", *_C.strategies())))
    message = re.escape(f"strategy is 'fastest'; required: one of {known}")
    with pytest.raises(dash.UnsupportedError, match=message):
        backward(call(), strategy="fastest")
    with pytest.raises(dash.UnsupportedError, match=message):
        backward(call(batch=0), strategy="fastest")


def test_refused_strategy_is_an_error_and_no_fallback() -> None:
    tensors = call(causal=True)
    problem = support.make_problem(tensors["q"].shape, tensors["k"].shape, True)
    refused = [s for s in _C.strategies() if _C.why_not(s, problem, 132) is not None]
    for strategy in refused:
        with pytest.raises(dash.UnsupportedError, match=f"strategy '{strategy}' needs"):
            backward(tensors, causal=True, strategy=strategy)


def test_reasons_lists_everything_that_is_wrong_in_the_order_of_the_checks() -> None:
    q, k = randn(2, 96, 33, 100), randn(2, 160, 2, 100)
    found = support.reasons(q, k, k.float(), softmax_lse=torch.zeros(1, dtype=torch.float16))
    starts = ["v has dtype", "q has head_dim 100", "v has head_dim_v 100", "q has 33 heads"]
    starts += ["softmax_lse has dtype", "softmax_lse has shape"]
    assert all(r.startswith(s) for r, s in zip(found, starts, strict=True))
    assert support.reasons(*(call()[name] for name in "qkv")) == []
    with pytest.raises(dash.UnsupportedError) as error:
        support.check(q, k, k.float())
    assert error.value.reasons == support.reasons(q, k, k.float())


@pytest.mark.skipif(_C.HAS_KERNELS, reason="this build has kernels")
def test_a_build_without_kernels_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="nvcc"):
        _C.resident_ctas(0, "bfloat16", 64)


# ---- The call of the kernels, seen from a machine that has none ----------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_cuda_call_fits_the_binding(monkeypatch, causal) -> None:
    """Addresses, strides and arguments of ``_C.backward``; the call itself only on a GPU."""
    called = []

    class Recorder:
        @staticmethod
        def backward(*arguments: object) -> None:
            called[:] = arguments

    monkeypatch.setattr(ops, "extension", lambda: Recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(ops, "_launches", {})
    tensors = call(batch=1, causal=causal)
    full = torch.zeros(1, 200, 2, 64, dtype=tensors["k"].dtype)
    full[:, :160] = tensors["k"]
    tensors["k"] = full[:, :160]
    tensors["softmax_lse"] = tensors["softmax_lse"][..., None]
    dq, dk, dv = ops._attention_bwd_cuda(*tensors.values(), None, causal)
    plan = dash.plan(dq.shape, dk.shape, dq.dtype, causal=causal, device="cpu")
    problem, *options = called[:5]
    assert repr(problem) == repr(plan.problem.in_tiles(plan.group_split))
    assert options == [plan.strategy, "bfloat16", 64, 0.125]
    rows, keys = (96 * 4 * 64, 4 * 64, 64), (160 * 2 * 64, 2 * 64, 64)
    strides = {"q": rows, "k": keys, "v": keys, "out": rows, "dout": rows}  # batch 1: made dense
    views = [(tensors[name].data_ptr(), *strides[name]) for name in strides]
    lse = (tensors["softmax_lse"].data_ptr(), 4 * 96, 96, 1)
    grads = [(t.data_ptr(), *s) for t, s in zip((dq, dk, dv), (rows, keys, keys), strict=True)]
    assert called[5:14] == [*views, lse, *grads]
    _, *rest = called[14:]
    # max_ctas, dlse, head_dim_v
    assert rest == [plan.workspace_bytes, None, 7, None, None, None]
    if not _C.HAS_KERNELS:
        with pytest.raises(RuntimeError, match="needs the CUDA kernels"):
            _C.backward(*called[:16], 0, 7)


@pytest.mark.parametrize("max_ctas", [0, -1])
def test_a_limit_of_the_grid_is_positive(max_ctas) -> None:
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 64, "seqlen_k": 64}
    problem = _C.Problem(**sizes, causal=False, tile_q=128, tile_kv=128)
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    arguments = {"problem": problem, "strategy": "ascending", "dtype": "float16", "head_dim": 64}
    arguments |= {"softmax_scale": 1.0, "workspace": 0, "workspace_bytes": 0, "device": 0}
    with pytest.raises(ValueError, match=f"max_ctas.*{max_ctas}"):
        _C.backward(**arguments, **dict.fromkeys(names, (0, 0, 0, 0)), stream=0, max_ctas=max_ctas)


# ---- Empty problems: CASES 12 --------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_empty_problems_give_zeros(sizes, causal) -> None:
    tensors = call(**sizes, causal=causal)
    for grad, like in zip(backward(tensors, causal=causal), "qkv", strict=True):
        assert grad.shape == tensors[like].shape
        assert grad.dtype == tensors[like].dtype
        assert not grad.any()
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    out = dash.attention(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))
