"""The operator and dash.attention as PyTorch sees them: schema, checks, strides, autograd."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dash
from dash import _C, support
from dash.forward import cudnn_forward, plain_forward
from dash.ops import tma_ready

BFLOAT16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BFLOAT16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(
    batch: int = 2,
    seqlen_q: int = 96,
    seqlen_k: int = 160,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = BFLOAT16,
    causal: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensor arguments of ``attention_bwd``, consistent with each other."""
    q = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, seed=2)
    v = randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, seed=3)
    dout = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=4)
    out, lse = plain_forward(q, k, v, head_dim**-0.5, causal)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}


def backward(tensors: dict[str, torch.Tensor], *rest: object, **more: object):
    return torch.ops.dash.attention_bwd(*tensors.values(), *rest, **more)


def assert_same_bits(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for name, x, want in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert torch.equal(x, want), name


# ---- What PyTorch checks -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"softmax_scale": 0.3}, {"strategy": "ascending"}])
def test_opcheck(causal, more) -> None:
    torch.library.opcheck(
        torch.ops.dash.attention_bwd, tuple(call().values()), {"causal": causal, **more}
    )


def test_opcheck_of_the_forward() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    torch.library.opcheck(torch.ops.dash.attention_fwd, (q, k, v, 0.125, True, "auto"))


def test_schema() -> None:
    schema = str(torch.ops.dash.attention_bwd.default._schema)
    assert schema == (
        "dash::attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
        'Tensor softmax_lse, float? softmax_scale=None, bool causal=False, str strategy="auto") '
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


@pytest.mark.parametrize("head_dim", [4, 100, 136, 256])
def test_head_dim_error(head_dim) -> None:
    message = f"q has head_dim {head_dim}; required: a multiple of 8 from 8 to 128"
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
    starts = ["v has dtype", "q has head_dim 100", "q has 33 heads"]
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


# ---- Strides: CASES 7 and 8 ----------------------------------------------------------------------


def test_lse_is_taken_in_both_shapes_and_any_strides() -> None:
    tensors = call()
    wanted = backward(tensors)
    lse = tensors["softmax_lse"]
    strided = torch.full((*lse.shape[:2], 2 * lse.shape[2]), torch.nan)[..., ::2].copy_(lse)
    for same in (lse[..., None], strided, lse.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_same_bits(backward(tensors | {"softmax_lse": same}), wanted)


def test_scalar_dout_expanded() -> None:
    tensors = call()
    one = torch.ones((), dtype=BFLOAT16).expand(tensors["dout"].shape)
    assert_same_bits(
        backward(tensors | {"dout": one}), backward(tensors | {"dout": one.contiguous()})
    )


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
def test_views(name) -> None:
    tensors = call()
    wanted = backward(tensors)
    t = tensors[name]
    for view in (heads_first(t), sliced(t), misaligned(t), odd_rows(t), strided_head_dim(t)):
        assert torch.equal(view, t)
        assert_same_bits(backward(tensors | {name: view}), wanted)


def heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(t: torch.Tensor) -> torch.Tensor:
    full = torch.full((t.shape[0], t.shape[1] + 128, *t.shape[2:]), torch.nan, dtype=t.dtype)
    full[:, :-128] = t
    return full[:, :-128]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Base off by 2 bytes."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def odd_rows(t: torch.Tensor) -> torch.Tensor:
    """A sequence stride that is no multiple of 8 elements."""
    row = t.shape[2] * t.shape[3]
    store = torch.full((t.shape[0], t.shape[1], row + 3), torch.nan, dtype=t.dtype)
    return store[..., :row].unflatten(2, t.shape[2:]).copy_(t)


def strided_head_dim(t: torch.Tensor) -> torch.Tensor:
    store = torch.full((*t.shape[:3], 2 * t.shape[3]), torch.nan, dtype=t.dtype)
    return store[..., ::2].copy_(t)


def test_tma_ready_copies_only_what_tma_cannot_take() -> None:
    t = randn(2, 96, 4, 64)
    for fine in (t, heads_first(t), sliced(t), t[:1], t[:, :1], t[:, 8:, 1:]):
        assert tma_ready(fine) is fine
    expanded = randn(1, 96, 4, 64).expand(2, -1, -1, -1)
    for view in (misaligned(t), odd_rows(t), strided_head_dim(t), expanded, t[..., 4:12]):
        copy = tma_ready(view)
        assert copy is not view
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


# ---- dash.attention ------------------------------------------------------------------------------


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float):
    """out in fp64, differentiable; bottom-right causal."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_and_its_gradients_match_pytorch(dtype, kv_heads, scale, causal) -> None:
    tensors = call(kv_heads=kv_heads, dtype=dtype)
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    out = dash.attention(q, k, v, causal=causal, softmax_scale=scale)
    wanted = exact(q, k, v, causal, 64**-0.5 if scale is None else scale)
    tolerance = 8e-3 if dtype == BFLOAT16 else 1e-3  # two roundings to the dtype
    assert relative_error(out, wanted) < tolerance
    grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    references = torch.autograd.grad(wanted, (q, k, v), tensors["dout"].double())
    for grad, reference in zip(grads, references, strict=True):
        assert relative_error(grad, reference) < tolerance


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(600, 600), (700, 520), (3, 530)])
def test_plain_forward(seqlen_q, seqlen_k, causal) -> None:
    """More query rows than one block; rows without keys give zeros and lse = -inf."""
    q, k, v = (call(1, seqlen_q, seqlen_k)[name] for name in "qkv")
    out, lse = plain_forward(q.double(), k.double(), v.double(), 0.2, causal)
    hidden = max(0, seqlen_q - seqlen_k) if causal else 0
    torch.testing.assert_close(out[:, hidden:], exact(q, k, v, causal, 0.2)[:, hidden:])
    assert not out[:, :hidden].any()
    assert (lse[..., :hidden] == -torch.inf).all()
    keys = k.double().repeat_interleave(2, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * 0.2
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask = mask.tril(seqlen_k - seqlen_q) if causal else mask
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))


def test_cudnn_is_never_used_for_a_mask_it_aligns_otherwise() -> None:
    q, k, v = (call()[name] for name in "qkv")
    with pytest.raises(ValueError, match="top-left"):
        cudnn_forward(q, k, v, 0.125, True)


def test_return_lse() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    out, lse = dash.attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 96)
    assert lse.dtype == torch.float32
    assert out.requires_grad
    assert not lse.requires_grad


def test_attention_checks_before_the_forward() -> None:
    q, k, v = (call()[name] for name in "qkv")
    with pytest.raises(dash.UnsupportedError, match="strategy is 'fastest'"):
        dash.attention(q, k, v, strategy="fastest")
    with pytest.raises(dash.UnsupportedError, match="v has dtype"):
        dash.attention(q, k, v.float())


def test_second_derivative_is_a_clear_error() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    dq = torch.autograd.grad(dash.attention(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no derivative"):
        dq.sum().backward()


def test_gradient_of_one_input_only() -> None:
    q, k, v = (call()[name] for name in "qkv")
    dash.attention(q, k.requires_grad_(), v).sum().backward()
    assert k.grad is not None
    assert q.grad is None


def test_torch_compile_keeps_one_graph_and_the_bits() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dash.attention(q * 2, k, v, causal=True).float().square().sum()

    eager = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager)
