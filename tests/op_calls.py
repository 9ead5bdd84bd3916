"""Arguments for the operator, and its call, on the CPU."""

from __future__ import annotations

import torch

import dash
from dash.forward import plain_forward

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


def qkv(**sizes: object) -> list[torch.Tensor]:
    """q, k and v of ``call``."""
    return [call(**sizes)[name] for name in "qkv"]


def attention_and_gradients(tensors: list[torch.Tensor], **more: object) -> list[torch.Tensor]:
    """out, dq, dk, dv of ``dash.attention``, for a sum as the loss."""
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    out = dash.attention(q, k, v, **more)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


def assert_same_bits(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for name, x, want in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert torch.equal(x, want), name
