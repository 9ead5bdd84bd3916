"""Inputs of a benchmark: normal values, and a forward and a backward to judge others by.

On a GPU those are FlashAttention-2's, elsewhere plain PyTorch's in fp32 (for tests, small shapes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dash.bench.shapes import Shape

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Tensors:
    """One problem's tensors.

    Attributes:
        dout, out: ``(batch, seqlen, heads, head_dim_v)``; packed ``(total_q, heads, head_dim_v)``.
        q: likewise with ``head_dim``; k, v with ``kv_heads``.
        lse: fp32 ``(batch, heads, seqlen)``; packed ``(heads, total_q)``.
        gradients: dq, dk, dv to judge by.
        cu_seqlens: int32 ``(batch + 1,)`` where packed, of q and k alike.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gradients: Gradients
    cu_seqlens: torch.Tensor | None = None


def make_tensors(shape: Shape, device: torch.device | str | None = None) -> Tensors:
    """A problem's inputs, and what FlashAttention-2 (on a CPU plain PyTorch) makes of them."""
    dout, q, k, v = normal_inputs(shape, device)
    cu_seqlens = None
    if shape.packed:
        ends = torch.tensor(shape.lengths).cumsum(0)
        cu_seqlens = torch.cat([torch.zeros(1), ends]).to(q.device, torch.int32)
    if q.is_cuda:
        out, lse, gradients = flash_reference(shape, dout, q, k, v, cu_seqlens)
    else:
        out, lse, gradients = plain_reference(shape, dout, q, k, v)
    return Tensors(dout, q, k, v, out, lse, gradients, cu_seqlens)


def normal_inputs(
    shape: Shape, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout, q, k, v: normal, never zeros, the same in every process of a run."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = (shape.out_shape, shape.q_shape, shape.k_shape, shape.v_shape)
    dtype = getattr(torch, shape.dtype)
    return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)


def flash_reference(
    shape: Shape,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """out, lse and gradients of PyTorch's FlashAttention-2."""
    from dash.bench.flash2 import Flash2

    flash = Flash2(shape, q, k, v, cu_seqlens)
    return flash.out, flash.lse, flash.backward(dout)


def plain_reference(
    shape: Shape, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """out, lse and gradients by softmax(Q Kᵀ) V in fp32, sequence by sequence."""
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    parts = [
        plain_sequence(shape, *(t[rows] for t, rows in zip(leaves, where, strict=True)))
        for where in sequence_slices(shape)
    ]
    outs, lses = zip(*parts, strict=True)
    out = torch.cat(outs) if shape.packed else torch.stack(outs)
    lse = torch.cat(lses, dim=1) if shape.packed else torch.stack(lses)
    gradients = torch.autograd.grad(out, leaves, dout.float())
    gradients = tuple(g.to(q.dtype) for g in gradients)
    return out.detach().to(q.dtype), lse.detach(), gradients


def sequence_slices(shape: Shape) -> list[tuple[object, object, object]]:
    """Where each sequence's rows of q, k and v are."""
    if not shape.packed:
        return [(i, i, i) for i in range(shape.batch)]
    ends = torch.tensor(shape.lengths).cumsum(0).tolist()
    rows = [slice(end - n, end) for end, n in zip(ends, shape.lengths, strict=True)]
    return [(r, r, r) for r in rows]


def plain_sequence(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``(seqlen, heads, head_dim_v)`` and lse ``(heads, seqlen)``; 0 where no key is seen."""
    group = shape.heads // shape.kv_heads
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
    scores = scores.masked_fill(~visible(shape, *scores.shape[1:], q.device), -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", p, v), lse


def visible(shape: Shape, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """bool ``(seqlen_q, seqlen_k)``: which keys a row sees."""
    row = torch.arange(seqlen_q, device=device).unsqueeze(1) + seqlen_k - seqlen_q
    column = torch.arange(seqlen_k, device=device)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if shape.causal:
        seen &= column <= row
    if shape.window_left is not None:
        seen &= column >= row - shape.window_left
    if shape.window_right is not None:
        seen &= column <= row + shape.window_right
    return seen
