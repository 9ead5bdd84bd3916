"""``dash.attention_varlen``: attention over packed sequences, deterministic in each of them."""

from __future__ import annotations

import torch

from dash.varlen import checks
from dash.varlen.forward import Pack, choose_forward

torch.library.define(
    "dash::attention_varlen_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float softmax_scale, bool causal, "
    "int? window_left, int? window_right, Tensor? seqused_q, Tensor? seqused_k, str forward, "
    "str strategy, int group_split) "
    "-> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    forward: str = "auto",
    strategy: str = "auto",
    group_split: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · softmax_scale) v in each of many sequences that lie one behind the other.

    Differentiable through ``dash::attention_varlen_bwd``: the gradients of a sequence are bit for
    bit those of a dense call on it alone (for the same out and lse), for every packing. Nothing
    waits for the device, but the plain forward on a GPU.

    Args:
        q: ``(total_q, heads, head_dim)``, bfloat16 or float16.
        k, v: ``(total_k, kv_heads, head_dim)``; ``heads`` is a multiple of ``kv_heads``.
        cu_seqlens_q: int32 ``(batch + 1,)`` on q's device: the first row of each sequence, then the
            end of the last. Starts with 0 and does not decrease. Rows behind the last entry belong
            to no sequence: zeros in out and in all gradients, whatever the inputs hold there.
        cu_seqlens_k: the same for k and v; None: that of q.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Forwards of others need an int; for None
            or a 0-d tensor (never read) they get the number of rows. Changes no bit.
        causal: row r of a sequence sees its keys 0 … r + seqlen_k − seqlen_q.
        softmax_scale: defaults to ``head_dim ** -0.5``.
        window_left, window_right: how many keys left and right of that diagonal a row sees; None:
            all of them. A window that no row of a sequence notices is as none, for that sequence.
        seqused_q, seqused_k: int32 ``(batch,)``: sequences shorter than their space. The rows
            between are zeros in out and in all gradients.
        forward: ``"auto"``, or a name of ``dash.varlen.forward.FORWARDS``.
        strategy, group_split: order of the gradients' sums; see ``dash.plan_varlen``.
        return_lse: also return the logsumexp, which is not differentiable.

    Returns:
        ``(total_q, heads, head_dim)`` in q's dtype; with ``return_lse`` also fp32 ``(heads,
        total_q)``, ±inf for rows without keys and rows of no sequence.

    Raises:
        UnsupportedError: the backward could not run, checked before the forward does. What
            ``cu_seqlens`` holds is checked on the CPU alone.
        NotImplementedError: when a second derivative is taken.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    bounds = (None if isinstance(m, torch.Tensor) else m for m in (max_seqlen_q, max_seqlen_k))
    out, lse = torch.ops.dash.attention_varlen_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, *bounds,
        scale, causal, window_left, window_right, seqused_q, seqused_k, forward, strategy,
        group_split,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _attention_varlen_fwd(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    *of_pack, forward, strategy, group_split = arguments
    pack = Pack(*of_pack)
    checks.check(
        *pack[:5], seqused_q=pack.seqused_q, seqused_k=pack.seqused_k, softmax_scale=pack.scale,
        causal=pack.causal, strategy=strategy, group_split=group_split, **pack.windows,
    )  # fmt: skip
    _, run = choose_forward(pack, forward)
    q = pack.q
    if q.numel() == 0 or pack.k.numel() == 0 or pack.cu_seqlens_q.shape[0] == 1:
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    return run(pack)


torch.library.impl("dash::attention_varlen_fwd", ("cpu", "cuda"), _attention_varlen_fwd)


@torch.library.register_fake("dash::attention_varlen_fwd")
def _attention_varlen_fwd_fake(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _save_for_backward(
    ctx: object, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    *of_pack, _forward, ctx.strategy, ctx.group_split = inputs
    pack = Pack(*of_pack)
    out, lse = output
    # The bounds stay behind: the backward never looks at them.
    ctx.rest = pack.scale, pack.causal, pack.window_left, pack.window_right
    ctx.save_for_backward(
        *pack[:3], out, lse, pack.cu_seqlens_q, pack.cu_seqlens_k, pack.seqused_q, pack.seqused_k
    )
    ctx.mark_non_differentiable(lse)


def _attention_varlen_backward(
    ctx: object, dout: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *tensors, seqused_q, seqused_k = ctx.saved_tensors
    gradients = torch.ops.dash.attention_varlen_bwd(
        dout, *tensors, None, None, *ctx.rest, seqused_q, seqused_k, ctx.strategy, ctx.group_split
    )
    return (*gradients, *(None,) * 13)


torch.library.register_autograd(
    "dash::attention_varlen_fwd", _attention_varlen_backward, setup_context=_save_for_backward
)
