"""Stands in for FlashAttention-3's package: its two functions' signatures, computed plainly.

Keys that no row sees and rows without keys are FlashAttention-3's: zeros. Anything that its
backward would not take raises, so that a wrong call of the benchmark cannot pass.
"""

from __future__ import annotations

import torch

from dash.bench.inputs import plain_sequence
from dash.bench.shapes import Shape

__version__ = "3.0.0-stand-in"
CALLS: list[dict[str, object]] = []


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    CALLS.append({"deterministic": deterministic, "window_size": window_size, "causal": causal})
    parts = [
        _sequence(*tensors, softmax_scale, causal, window_size)
        for tensors in zip(q, k, v, strict=True)
    ]
    return torch.stack(parts)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    CALLS.append({"deterministic": deterministic, "window_size": window_size, "causal": causal})
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for i in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        parts.append(_sequence(q[rows], k[keys], v[keys], softmax_scale, causal, window_size))
    return torch.cat(parts)


def _sequence(q, k, v, softmax_scale, causal, window_size):
    assert softmax_scale == q.shape[-1] ** -0.5
    assert all(isinstance(side, int) for side in window_size)
    left, right = (None if side < 0 else side for side in window_size)
    if causal:
        right = 0
    shape = Shape(
        1, len(q), q.shape[1], k.shape[1], q.shape[2],
        seqlen_k=len(k), head_dim_v=v.shape[2], window_left=left, window_right=right,
    )  # fmt: skip
    out, _ = plain_sequence(shape, q.float(), k.float(), v.float())
    return out.to(q.dtype)
