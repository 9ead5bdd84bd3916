"""Inputs whose dK and dV say in which order the q heads of a group, and their parts, were added."""

from __future__ import annotations

import torch
from inputs import Inputs

BIG = 2.0**24  # in fp32, BIG + 1 is BIG
TERMS = (BIG, 1.0, 1.0, -BIG)  # of the four q heads of a group
# parts → the sum: one after another; in two pairs (BIG + (1 - BIG)); four in ascending order. In
# descending order four parts would give 2.
SUMS = {1: 0.0, 2: 1.0, 4: 0.0}


def signs(kv_heads: int) -> torch.Tensor:
    """(-1)^h of every KV head h."""
    return 1.0 - 2.0 * (torch.arange(kv_heads) % 2)


def order_revealing_heads(
    batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """One row and one key, P = 1: a q head's term of dV is in column 0, of -dK in all columns.

    The terms of a KV head are ``TERMS`` times its sign. softmax_scale is 1.
    """
    heads = kv_heads * len(TERMS)
    terms = (signs(kv_heads)[:, None] * torch.tensor(TERMS)).flatten()
    dout = torch.zeros(batch, 1, heads, head_dim)
    dout[..., 0] = terms[None, None]
    out = torch.zeros_like(dout)
    out[..., 0] = 1.0  # so delta is the term, and dS = P (0 - delta)
    tensors = dout, torch.ones_like(dout), *(torch.zeros(batch, 1, kv_heads, head_dim),) * 2, out
    lse = torch.zeros(batch, heads, 1, device=device)
    return Inputs(*(t.to(device, dtype).clone() for t in tensors), lse, 1.0)


def expected(inputs: Inputs, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv of ``order_revealing_heads`` with so many parts."""
    sums = (signs(inputs.v.shape[2]) * SUMS[parts]).to(inputs.v)
    dv = torch.zeros_like(inputs.v)
    dv[..., 0] = sums
    dk = -sums[:, None].expand(dv.shape)
    return dk, dv
