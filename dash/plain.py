"""The forward in plain PyTorch: for the CPU, and for what the kernels of others refuse."""

from __future__ import annotations

import torch

from dash.mask import Mask
from dash.memory import contiguous

# Query rows a step: bounds the scores to (batch, heads, 512, seqlen_k) fp32.
_ROWS = 512


def plain_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over a block of query rows at a time, in fp32 (fp64 for fp64 inputs)."""
    with torch.autocast(q.device.type, enabled=False):
        mask = Mask.of(q.shape[1], k.shape[1], causal, window_left, window_right)
        return _in_blocks(q, k, v, scale, mask)


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    (seqlen_q, heads), (seqlen_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    precision = torch.promote_types(q.dtype, torch.float32)
    # (batch, kv_heads, group, seqlen_q, head_dim) and (batch, kv_heads, 1, seqlen_k, head_dim)
    grouped_q = q.unflatten(2, (kv_heads, heads // kv_heads)).movedim(1, 3).to(precision)
    keys, values = (t.transpose(1, 2)[:, :, None].to(precision) for t in (k, v))
    columns = torch.arange(seqlen_k, device=q.device)
    outs, lses = [], []
    for start in range(0, max(seqlen_q, 1), _ROWS):
        rows = torch.arange(start, min(start + _ROWS, seqlen_q), device=q.device)
        scores = (grouped_q[..., rows, :] @ keys.mT) * scale
        if not mask.full:
            scores = scores.masked_fill(~mask.sees(rows, columns), -torch.inf)
        lse = scores.logsumexp(-1)
        # In a row without keys scores and lse are -inf, and their difference would be NaN.
        p = torch.exp(scores - lse.masked_fill(rows < mask.keyless_rows, 0.0)[..., None])
        outs.append(p @ values)
        lses.append(lse)
    out = torch.cat(outs, 3).movedim(3, 1).flatten(2, 3)
    return contiguous(out.to(q.dtype)), torch.cat(lses, 3).flatten(1, 2)
