"""``dash.attention``: attention whose gradients are bit for bit the same on every run."""

from __future__ import annotations

import torch

from dash import support
from dash.forward import choose_forward

torch.library.define(
    "dash::attention_fwd",
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, str strategy, "
    "int group_split) "
    "-> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    strategy: str = "auto",
    group_split: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · softmax_scale) v, differentiable through ``dash::attention_bwd``.

    The forward pass is the best one present (``dash.forward``); the backward is dash's.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, bfloat16 or float16.
        k, v: ``(batch, seqlen_k, kv_heads, head_dim)``; ``heads`` is a multiple of ``kv_heads``.
        causal: query row r sees key columns 0 … r + seqlen_k − seqlen_q (bottom-right aligned).
        softmax_scale: defaults to ``head_dim ** -0.5``.
        strategy, group_split: order of the gradients' sums; see ``dash.plan``.
        return_lse: also return the logsumexp, which is not differentiable.

    Returns:
        ``(batch, seqlen_q, heads, head_dim)`` in q's dtype; with ``return_lse`` also fp32
        ``(batch, heads, seqlen_q)``, ±inf for rows without keys.

    Raises:
        UnsupportedError: the backward could not run, checked before the forward does.
        NotImplementedError: when a second derivative is taken.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.ops.dash.attention_fwd(q, k, v, scale, causal, strategy, group_split)
    return (out, lse) if return_lse else out


def _attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    strategy: str,
    group_split: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = {"strategy": strategy, "group_split": group_split}
    support.check(q, k, v, softmax_scale=softmax_scale, causal=causal, **order)
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    _, forward = choose_forward(q, k, v, causal)
    return forward(q, k, v, softmax_scale, causal)


torch.library.impl("dash::attention_fwd", ("cpu", "cuda"), _attention_fwd)


@torch.library.register_fake("dash::attention_fwd")
def _attention_fwd_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    strategy: str,
    group_split: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _save_for_backward(
    ctx: object, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q, k, v, *ctx.rest = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _attention_backward(
    ctx: object, dout: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dq, dk, dv = torch.ops.dash.attention_bwd(dout, q, k, v, out, lse, *ctx.rest)
    return dq, dk, dv, None, None, None, None


torch.library.register_autograd(
    "dash::attention_fwd", _attention_backward, setup_context=_save_for_backward
)
