"""Forward passes that ``dash.attention`` may call; none of them is ours but the last.

The best one present is taken, in this order:

1. the package of FlashAttention-3 (``flash_attn_interface``);
2. the cuDNN kernel behind PyTorch's SDPA. Its causal mask is aligned top-left, so for a causal
   mask only where seqlen_q = seqlen_k;
3. the FlashAttention-2 kernel behind SDPA. Called as an operator its causal mask is aligned
   bottom-right, as dash defines it (torch/nn/attention/bias.py relies on the same);
   ``scaled_dot_product_attention(is_causal=True)`` is not: it refuses or realigns unequal lengths;
4. plain PyTorch, for the CPU and for what the others refuse.

All return ``out`` ``(batch, seqlen_q, heads, head_dim)`` in q's dtype and ``lse`` ``(batch, heads,
seqlen_q)`` fp32, the natural log of the sum of exp of the scaled scores, ±inf for rows without
keys. Rows without keys have zeros in ``out``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]
]

# Query rows a step of the plain forward: bounds the scores to (batch, heads, 512, seqlen_k) fp32.
_PLAIN_ROWS = 512


def choose_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[str, Forward]:
    """The name of the best forward present for these tensors, and the forward.

    Which kernel PyTorch may use follows its own switches (``torch.nn.attention.sdpa_kernel``).
    """
    if q.device.type != "cuda":
        return "plain", plain_forward
    if fa3_package() is not None:
        return "fa3", fa3_forward
    square = q.shape[1] == k.shape[1]
    if (square or not causal) and torch.backends.cuda.can_use_cudnn_attention(
        _sdpa_params(q, k, v, causal)
    ):
        return "cudnn", cudnn_forward
    # SDPA's own check refuses a causal mask for unequal lengths, which the operator can do.
    if torch.backends.cuda.can_use_flash_attention(_sdpa_params(q, k, v, causal and square)):
        return "flash", flash_forward
    return "plain", plain_forward


@functools.lru_cache(maxsize=1)
def fa3_package() -> ModuleType | None:
    """``flash_attn_interface`` where it is installed and loads, else None."""
    try:
        return importlib.import_module("flash_attn_interface")
    except (ImportError, OSError):  # OSError: built for another torch
        return None


def fa3_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    function = fa3_package().flash_attn_func
    # Releases up to spring 2025 always return lse; later ones only when asked.
    asks = "return_attn_probs" in inspect.signature(function).parameters
    more = {"return_attn_probs": True} if asks else {}
    out, lse, *_ = function(q, k, v, softmax_scale=scale, causal=causal, **more)
    return out.contiguous(), lse.contiguous()


def cudnn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError("cuDNN's causal mask is aligned top-left: wrong unless lengths are equal")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3]).contiguous()


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over a block of query rows at a time, in fp32 (fp64 for fp64 inputs)."""
    _batch, seqlen_q, heads, _head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    precision = torch.promote_types(q.dtype, torch.float32)
    # (batch, kv_heads, group, seqlen_q, head_dim) and (batch, kv_heads, 1, seqlen_k, head_dim)
    grouped_q = q.unflatten(2, (kv_heads, heads // kv_heads)).movedim(1, 3).to(precision)
    keys, values = (t.transpose(1, 2)[:, :, None].to(precision) for t in (k, v))
    out = torch.empty_like(grouped_q)
    lse = torch.empty(grouped_q.shape[:-1], dtype=precision, device=q.device)
    columns = torch.arange(seqlen_k, device=q.device)
    for start in range(0, seqlen_q, _PLAIN_ROWS):
        rows = slice(start, min(start + _PLAIN_ROWS, seqlen_q))
        scores = (grouped_q[..., rows, :] @ keys.mT) * scale
        if causal:
            last = torch.arange(rows.start, rows.stop, device=q.device) + seqlen_k - seqlen_q
            scores = scores.masked_fill(columns > last[:, None], -torch.inf)
        row_lse = scores.logsumexp(-1)
        # In a row without keys scores and lse are -inf, and their difference would be NaN.
        p = torch.exp(scores - row_lse.masked_fill(row_lse == -torch.inf, 0.0)[..., None])
        out[..., rows, :] = p @ values
        lse[..., rows] = row_lse
    out = out.movedim(3, 1).flatten(2, 3).to(q.dtype)
    return out.contiguous(), lse.flatten(1, 2).contiguous()


def _sdpa_params(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.backends.cuda.SDPAParams:
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)
