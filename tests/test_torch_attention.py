"""dash in PyTorch's registry of flash attentions: by torch's own functions.

torch has CUDA kernels alone for these operators. On the CPU the same overrides are put on the CPU's
dispatch key, and the test brings a forward for it.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from op_calls import assert_same_bits, call, randn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash
from dash.compat import torch_attention

registry = pytest.importorskip(
    "torch.nn.attention._registry", reason="torch is older than 2.10: it has no such registry"
)
from torch.nn.attention import (  # noqa: E402
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn  # noqa: E402

# torch 2.10 and 2.11 have no such argument and do not ask for equal numbers of heads.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
BOUNDS = torch.tensor([0, 40, 41, 96], dtype=torch.int32)


def test_nothing_is_registered_on_import_and_register_only_adds_a_name() -> None:
    registry._FLASH_ATTENTION_IMPLS.pop("DASH", None)
    torch_attention.register()
    assert "DASH" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


def test_activating_and_restoring_by_torchs_functions() -> None:
    def kernels() -> list[bool]:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has("aten::_flash_attention_backward", key) for key in ("CUDA", "CPU")]

    before, dump = kernels(), torch._C._dispatch_dump("aten::_flash_attention_backward")
    torch_attention.register()
    activate_flash_attention_impl("DASH")
    try:
        assert current_flash_attention_impl() == "DASH"
        assert torch._C._dispatch_dump("aten::_flash_attention_backward") != dump
    finally:
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    assert kernels() == before
    assert torch._C._dispatch_dump("aten::_flash_attention_backward") == dump


# ---- On the CPU's key ----------------------------------------------------------------------------


@pytest.fixture
def on_the_cpu():
    """dash's overrides, and a forward pass, for CPU tensors."""
    overrides = torch_attention.Overrides("CPU")
    library = torch.library.Library("aten", "IMPL", "CPU")

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None,
                window_size_left=None, window_size_right=None, **more):  # fmt: skip
        sides = {"window_left": window_size_left, "window_right": window_size_right}
        sides = {name: side for name, side in sides.items() if side is not None and side >= 0}
        out, lse = dash.attention_varlen(
            q, k, v, cum_q, cum_k, causal=causal, softmax_scale=scale, return_lse=True, **sides
        )
        none = torch.zeros(2, dtype=torch.uint64)
        return out, lse, none, none.clone(), q.new_empty(0)

    library.impl("_flash_attention_forward", forward, "CPU")
    yield
    library._destroy()
    overrides.remove()
    overrides.remove()  # a second time does nothing


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (16, 8)], ids=str)
def test_varlen_attn_runs_its_backward_in_dash(on_the_cpu, window) -> None:
    q, k, v, dout = (randn(96, heads, 64, seed=heads + i) for i, heads in enumerate((4, 2, 2, 4)))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = varlen_attn(*leaves, BOUNDS, BOUNDS, 55, 55, window_size=window, **GROUPED, scale=0.2)
    got = torch.autograd.grad(out, leaves, dout)
    left, right = (None if side < 0 else side for side in window)
    ours = dash.attention_varlen(
        *leaves, BOUNDS, causal=window == (-1, 0), window_left=left, window_right=right,
        softmax_scale=0.2,
    )  # fmt: skip
    assert torch.equal(out, ours)
    assert_same_bits(got, torch.autograd.grad(ours, leaves, dout))


def dense(name: str, t: dict[str, torch.Tensor], dropout: float = 0.0, bias=None, causal=True):
    """aten's backward ``name`` of ``call``'s tensors, as SDPA's autograd calls it."""
    tensors = [t[n].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")]
    lse, seed = t["softmax_lse"], torch.zeros((), dtype=torch.uint64)
    lengths = t["q"].shape[1], t["k"].shape[1]
    # An undefined tensor is what autograd passes for cum_seq; from Python, an Optional's None.
    if name == "flash":
        rest = (None, None, *lengths, dropout, causal, seed, seed)
        return torch_attention._sdpa_flash_backward(*tensors, lse, *rest)
    rest = (seed, seed, bias, None, None, *lengths, dropout, causal)
    return torch_attention._sdpa_cudnn_backward(*tensors, lse[..., None], *rest)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_sdpas_backward_is_the_operator(name) -> None:
    t = call(seqlen_q=96, seqlen_k=96, causal=True)
    got = [grad.transpose(1, 2) for grad in dense(name, t)]
    assert_same_bits(got, torch.ops.dash.attention_bwd(*t.values(), causal=True))


def test_what_dash_cannot_do_raises() -> None:
    t = call(seqlen_q=96, seqlen_k=96, causal=True)
    for name in ("flash", "cudnn"):
        with pytest.raises(dash.UnsupportedError, match=r"dropout_p is 0\.1; required: 0\.0"):
            dense(name, t, dropout=0.1)
    with pytest.raises(dash.UnsupportedError, match="attn_bias is a tensor of shape"):
        dense("cudnn", t, bias=torch.zeros(1, 1, 96, 96))
    with pytest.raises(dash.UnsupportedError, match="causal mask over unequal lengths"):
        dense("cudnn", call(causal=True))


# ---- On the GPU, where torch chooses -------------------------------------------------------------


@pytest.fixture
def activated(monkeypatch):
    """dash activated; yields the names of the operators that it was called for."""
    calls = []

    def recorded(name: str):
        plain = getattr(torch_attention, name)

        def call_and_record(*args, **more):
            calls.append(name)
            return plain(*args, **more)

        return call_and_record

    for name in ("_flash_backward", "_sdpa_flash_backward", "_sdpa_cudnn_backward"):
        monkeypatch.setattr(torch_attention, name, recorded(name))
    torch_attention.register()
    activate_flash_attention_impl("DASH")
    yield calls
    restore_flash_attention_impl()


def gpu(*shape: int, seed: int) -> torch.Tensor:
    return randn(*shape, seed=seed).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (SDPBackend.FLASH_ATTENTION, "_sdpa_flash_backward"),
        (SDPBackend.CUDNN_ATTENTION, "_sdpa_cudnn_backward"),
    ],
)
def test_sdpa_on_the_gpu(activated, backend, name, causal) -> None:
    leaves = [gpu(2, 4, 300, 64, seed=i).requires_grad_() for i in range(3)]
    dout = gpu(2, 4, 300, 64, seed=9)
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert name in activated
    assert_same_bits(got, torch.autograd.grad(out, leaves, dout))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    reference = functional.scaled_dot_product_attention(*exact, is_causal=causal)
    for grad, wanted in zip(got, torch.autograd.grad(reference, exact, dout.double()), strict=True):
        assert (grad - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.gpu
def test_varlen_attn_on_the_gpu(activated) -> None:
    leaves = [gpu(96, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    bounds, dout = BOUNDS.cuda(), gpu(96, 4, 64, seed=9)
    out = varlen_attn(*leaves, bounds, bounds, 55, 55, window_size=(-1, 0), **GROUPED)
    got = torch.autograd.grad(out, leaves, dout)
    assert activated == ["_flash_backward"]
    ours = torch.autograd.grad(dash.attention_varlen(*leaves, bounds, causal=True), leaves, dout)
    for grad, wanted in zip(got, ours, strict=True):  # another forward: another rounding of out
        assert (grad - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.gpu
def test_jagged_nested_tensors_on_the_gpu(activated) -> None:
    values = [gpu(96, 4, 64, seed=i).requires_grad_() for i in range(3)]
    offsets = BOUNDS.cuda().long()
    nested = [
        torch.nested.nested_tensor_from_jagged(t, offsets, min_seqlen=1, max_seqlen=55).transpose(
            1, 2
        )
        for t in values
    ]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(*nested, is_causal=True)
    out.transpose(1, 2).values().sum().backward()
    assert activated == ["_flash_backward"]
    assert all(torch.isfinite(t.grad).all() for t in values)


@pytest.mark.gpu
def test_dropout_raises_on_the_gpu(activated) -> None:
    leaves = [gpu(1, 4, 128, 64, seed=i).requires_grad_() for i in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(*leaves, dropout_p=0.1)
    with pytest.raises(dash.UnsupportedError, match="dropout_p"):
        out.sum().backward()


@pytest.mark.gpu
def test_after_restoring_torchs_kernel_runs(activated) -> None:
    restore_flash_attention_impl()
    leaves = [gpu(1, 4, 128, 64, seed=i).requires_grad_() for i in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        functional.scaled_dot_product_attention(*leaves).sum().backward()
    assert activated == []
    activate_flash_attention_impl("DASH")
