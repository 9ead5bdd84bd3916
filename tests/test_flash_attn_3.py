"""``dash.compat.flash_attn_3``: FlashAttention-3's signatures, and dash's results under them."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch
from op_calls import assert_same_bits, call, randn

import dash
from dash.compat import flash_attn_3
from dash.forward import fa3_package

# Names, order and defaults as callers know them (TransformerEngine, ring attention): what is
# written here was taken from FlashAttention-3's documentation, not from the module under test.
_HINTS = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_QUANTIZED = "qv=None, q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {
    "flash_attn_func": (
        f"(q, k, v, softmax_scale=None, causal=False, {_QUANTIZED}, window_size=(-1, -1), "
        f"attention_chunk=0, softcap=0.0, {_HINTS})"
    ),
    "flash_attn_varlen_func": (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        f"seqused_k=None, softmax_scale=None, causal=False, {_QUANTIZED}, window_size=(-1, -1), "
        f"attention_chunk=0, softcap=0.0, {_HINTS})"
    ),
    "_flash_attn_forward": (
        "(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
        "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, "
        "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, "
        "window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0)"
    ),
    "_flash_attn_backward": (
        "(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
        "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
        "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, deterministic=False, sm_margin=0)"
    ),
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False)"
    ),
}
BOUNDS = torch.tensor([0, 40, 41, 96], dtype=torch.int32)


def packed() -> dict[str, torch.Tensor]:
    """q, k, v, dout of three sequences, ``(total, heads, head_dim)``."""
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    return {name: randn(96, h, 64, seed=i) for i, (name, h) in enumerate(heads.items())}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name) -> None:
    assert str(inspect.signature(getattr(flash_attn_3, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_the_installed_package(name) -> None:
    if fa3_package() is None:
        pytest.skip("flash_attn_interface (FlashAttention-3) is not installed")
    theirs = inspect.signature(inspect.unwrap(getattr(fa3_package(), name))).parameters
    ours = inspect.signature(getattr(flash_attn_3, name)).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


# ---- The differentiable functions ----------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_dense_function_is_dash_attention(deterministic) -> None:
    t = call(causal=True)
    leaves = [t[name].requires_grad_() for name in "qkv"]
    more = {"causal": True, "window_size": (30, 0), "softmax_scale": 0.2}
    out, lse = flash_attn_3.flash_attn_func(
        *leaves, deterministic=deterministic, return_attn_probs=True, **more
    )
    got = torch.autograd.grad(out, leaves, t["dout"])
    ours = dash.attention(*leaves, causal=True, window_left=30, softmax_scale=0.2, return_lse=True)
    assert torch.equal(out, ours[0])
    assert torch.equal(lse, ours[1])
    assert_same_bits(got, torch.autograd.grad(ours[0], leaves, t["dout"]))
    plain = flash_attn_3.flash_attn_func(*leaves, deterministic=deterministic, **more)
    assert torch.equal(plain, out)


@pytest.mark.parametrize("bound", [55, torch.tensor(55, dtype=torch.int32)], ids=["int", "tensor"])
def test_packed_function_is_dash_attention_varlen(bound) -> None:
    t = packed()
    leaves = [t[name].requires_grad_() for name in "qkv"]
    out, lse = flash_attn_3.flash_attn_varlen_func(
        *leaves, BOUNDS, BOUNDS, bound, bound, causal=True, return_attn_probs=True
    )
    assert lse.shape == (4, 96)
    got = torch.autograd.grad(out, leaves, t["dout"])
    ours = dash.attention_varlen(*leaves, BOUNDS, causal=True)
    assert torch.equal(out, ours)
    assert_same_bits(got, torch.autograd.grad(ours, leaves, t["dout"]))


# ---- The two halves, called by position ----------------------------------------------------------


def views(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """NaN in every second head, transposed and padded rows of a larger buffer: any strides."""
    *lead, heads, head_dim = shape
    whole = torch.full((heads, 2, *lead, head_dim + 8), torch.nan, dtype=dtype)
    return whole[:, 1].movedim(0, -2)[..., 8:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_backward_writes_into_the_callers_tensors(form, dtype) -> None:
    bounds = (None, None) if form == "dense" else (BOUNDS, BOUNDS)
    t = call(causal=True) if form == "dense" else packed()
    if form == "packed":
        t["out"], t["softmax_lse"] = flash_attn_3._flash_attn_forward(
            t["q"], t["k"], t["v"], cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS, causal=True
        )[:2]
    tensors = [t[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    operator = (
        torch.ops.dash.attention_bwd if form == "dense" else torch.ops.dash.attention_varlen_bwd
    )
    wanted = operator(*tensors, *(b for b in bounds if b is not None), causal=True)
    given = [views(t[name].shape, dtype) for name in "qkv"]
    softmax_d = flash_attn_3._flash_attn_backward(
        *tensors, *bounds, None, None, 55, 55, *given, 64**-0.5, True, -1, -1, 0.0, False, 0
    )
    for wrote, grad in zip(given, wanted, strict=True):
        assert torch.equal(wrote, grad.to(dtype))
    delta = (t["dout"].double() * t["out"].double()).sum(-1).transpose(-1, -2)
    assert softmax_d.dtype == torch.float32
    assert softmax_d.shape == t["softmax_lse"].shape
    torch.testing.assert_close(softmax_d.double(), delta, rtol=1e-5, atol=1e-4)


def test_forward_fills_the_callers_out() -> None:
    t = call(causal=True)
    given = views(t["q"].shape)
    out, lse, *rest = flash_attn_3._flash_attn_forward(
        t["q"], t["k"], t["v"], out_=given, causal=True
    )
    assert out is given
    assert torch.equal(out, t["out"])
    assert torch.equal(lse, t["softmax_lse"])
    assert rest == [None, None]


def test_gradients_that_are_not_wanted_are_not_written() -> None:
    t = call()
    dk = torch.empty_like(t["k"])
    flash_attn_3._flash_attn_backward(*t.values(), dk=dk)
    assert torch.equal(dk, torch.ops.dash.attention_bwd(*t.values())[1])


# ---- What raises ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qv", torch.zeros(1)), ("q_descale", torch.ones(1)), ("k_descale", torch.ones(1)),
        ("v_descale", torch.ones(1)), ("attention_chunk", 64), ("softcap", 30.0),
    ],
)  # fmt: skip
def test_what_dash_cannot_do_raises_and_names_it(name, value) -> None:
    t = call()
    with pytest.raises(dash.UnsupportedError, match=f"{name} is .*; required: "):
        flash_attn_3.flash_attn_func(t["q"], t["k"], t["v"], **{name: value})
    with pytest.raises(dash.UnsupportedError, match=f"{name} is .*; required: "):
        flash_attn_3._flash_attn_forward(t["q"], t["k"], t["v"], **{name: value})
    p = packed()
    with pytest.raises(dash.UnsupportedError, match=f"{name} is .*; required: "):
        flash_attn_3.flash_attn_varlen_func(
            p["q"], p["k"], p["v"], BOUNDS, BOUNDS, 55, 55, **{name: value}
        )
    if name == "softcap":
        with pytest.raises(dash.UnsupportedError, match=r"softcap is 30\.0; required: 0\.0"):
            flash_attn_3._flash_attn_backward(*t.values(), softcap=value)


@pytest.mark.parametrize(
    "name",
    ["k_new", "v_new", "cu_seqlens_k_new", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos"],
)
def test_a_kv_cache_raises(name) -> None:
    t = call()
    with pytest.raises(dash.UnsupportedError, match=f"{name} is a tensor of shape"):
        flash_attn_3._flash_attn_forward(t["q"], t["k"], t["v"], **{name: torch.ones(2)})
    with pytest.raises(dash.UnsupportedError, match="KV cache"):
        flash_attn_3.flash_attn_with_kvcache(t["q"], t["k"], t["v"])


def test_half_of_the_bounds_raises() -> None:
    p = packed()
    with pytest.raises(dash.UnsupportedError, match="required: both or none"):
        flash_attn_3._flash_attn_forward(p["q"], p["k"], p["v"], cu_seqlens_q=BOUNDS)


# ---- Under its own name --------------------------------------------------------------------------


def test_install_gives_the_module_to_who_imports_it_and_remove_takes_it_back() -> None:
    real = fa3_package()
    handle = flash_attn_3.install()
    try:
        found = importlib.import_module("flash_attn_interface")
        assert found._flash_attn_backward is flash_attn_3._flash_attn_backward
        assert fa3_package() is real  # dash's own forward must not become dash
        t = call()
        assert dash.attention(t["q"], t["k"], t["v"]).shape == t["q"].shape
    finally:
        handle.remove()
    assert sys.modules.get("flash_attn_interface") is real
    handle.remove()


def test_install_covers_the_copy_that_transformer_engine_imports(tmp_path, monkeypatch) -> None:
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = flash_attn_3.install()
    try:
        copy = importlib.import_module("flash_attn_3.flash_attn_interface")
        assert copy._flash_attn_forward is flash_attn_3._flash_attn_forward
    finally:
        handle.remove()
        sys.modules.pop("flash_attn_3", None)
    assert "flash_attn_3.flash_attn_interface" not in sys.modules
