"""Context parallelism over FlashAttention-3's two halves: ring attention in zigzag order.

All ranks of a ring in one process. Rank r of n has chunks r and 2n − 1 − r of the sequence, so that
a causal mask gives all ranks the same work. Keys and values travel; a rank merges the partial out
and lse of each visit, and afterwards asks for the gradients of each visit with the merged ones.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dash.compat.flash_attn_3 import _flash_attn_backward, _flash_attn_forward

CHUNK, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 64


def zigzag(rank: int, ranks: int) -> torch.Tensor:
    """The tokens of a rank, in order."""
    chunks = rank, 2 * ranks - 1 - rank
    return torch.cat([torch.arange(c * CHUNK, (c + 1) * CHUNK) for c in chunks])


def visit(rank: int, source: int) -> tuple[slice, slice, bool]:
    """Which of a rank's queries see which of the keys of ``source``, and whether causally.

    Keys of an earlier rank: all queries see the first chunk, none the second. Of a later one: the
    second chunk of queries sees all keys.
    """
    everything, first, second = slice(None), slice(0, CHUNK), slice(CHUNK, None)
    if source == rank:
        return everything, everything, True
    return (everything, first, False) if source < rank else (second, everything, False)


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merges a partial result, in place, in fp32: ``(batch, rows, heads, …)`` out, lse likewise."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp()[..., None]).add_(more * (more_lse - both).exp()[..., None])
    lse.copy_(both)


def ring_forward(rank: int, ranks: int, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged out in bfloat16 and lse ``(batch, heads, rows)``."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:3], -torch.inf)
    for step in range(ranks):
        source = (rank - step) % ranks
        rows, columns, causal = visit(rank, source)
        part, part_lse, *_ = _flash_attn_forward(
            q[:, rows], k[source][:, columns], v[source][:, columns],
            softmax_scale=HEAD_DIM**-0.5, causal=causal,
        )  # fmt: skip
        merge(out[:, rows], lse[:, rows], part.float(), part_lse.transpose(1, 2))
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def ring(ranks: int, accumulate: torch.dtype) -> tuple[list, list]:
    """out, dq, dk, dv of the whole sequence by a ring, in its order, and exactly in fp64."""
    total = 2 * ranks * CHUNK
    generator = torch.Generator().manual_seed(ranks)
    q, k, v, dout = (
        torch.randn(1, total, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    tokens = [zigzag(rank, ranks) for rank in range(ranks)]
    of_rank = [[t[:, own] for own in tokens] for t in (q, k, v, dout)]
    sums = [torch.zeros(t.shape, dtype=accumulate) for t in (q, k, v)]
    outs = torch.empty_like(q)
    for rank in range(ranks):
        q_rank, dout_rank = of_rank[0][rank], of_rank[3][rank]
        out, lse = ring_forward(rank, ranks, q_rank, of_rank[1], of_rank[2])
        outs[:, tokens[rank]] = out
        for step in range(ranks):
            source = (rank - step) % ranks
            rows, columns, causal = visit(rank, source)
            keys = tokens[source][columns]
            parts = [torch.empty(t.shape, dtype=torch.bfloat16) for t in (
                q_rank[:, rows], k[:, keys], v[:, keys])]  # fmt: skip
            _flash_attn_backward(
                dout_rank[:, rows], q_rank[:, rows], of_rank[1][source][:, columns],
                of_rank[2][source][:, columns], out[:, rows], lse[:, :, rows],
                None, None, None, None, rows, columns, *parts, HEAD_DIM**-0.5, causal,
            )  # fmt: skip
            for whole, part, where in zip(
                sums, parts, (tokens[rank][rows], keys, keys), strict=True
            ):
                whole[:, where] += part.to(accumulate)
    return [outs, *sums], exact(q, k, v, dout)


def exact(q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv in fp64 of the whole sequence."""
    leaves = [t.double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, dout.double().transpose(1, 2))
    return [t.detach().transpose(1, 2) for t in (out, *grads)]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("ranks", [2, 4])
def test_partial_gradients_of_a_ring_add_up(ranks) -> None:
    """Within a small multiple of bfloat16's rounding, 2^-9, of fp64; a lost visit is far more."""
    got, wanted = ring(ranks, torch.float32)
    for name, x, true in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert error(x, true) < 2.5 * 2**-8, name


def test_the_order_of_a_ring_repeats_and_fp32_sums_lose_less() -> None:
    first, true = ring(4, torch.float32)
    again, _ = ring(4, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    rounded, _ = ring(4, torch.bfloat16)
    for in_fp32, in_bf16, wanted in zip(first[1:], rounded[1:], true[1:], strict=True):
        assert error(in_fp32, wanted) <= error(in_bf16, wanted)
