"""One value for the arguments of a packed backward, which has eighteen."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PackedCall(NamedTuple):
    """The arguments of ``torch.ops.dash.attention_varlen_bwd``, in its order.

    Attributes:
        q: ``(total_q, heads, head_dim)``; dout, out: the same with ``head_dim_v``.
        k: ``(total_k, kv_heads, head_dim)``; v: the same with ``head_dim_v``.
        softmax_lse: float32 ``(heads, total_q)``, natural log; ±inf for a row without keys.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: the first row of each sequence, then the
            end of the last. The first entry is 0 and none is smaller than the one before it.
        max_seqlen_q, max_seqlen_k: never read.
        softmax_scale: None for ``head_dim ** -0.5``.
        causal: bottom-right aligned in each sequence.
        window_left, window_right: keys left and right of the diagonal that a row sees; None: all.
        seqused_q, seqused_k: int32 ``(batch,)``, the rows of its space that a sequence uses; None:
            all of them.
        strategy, group_split: the order of the sums, chosen for each sequence as for a dense call.
        dlse: float32 ``(heads, total_q)``, a gradient of lse; None: none.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | torch.Tensor | None = None
    max_seqlen_k: int | torch.Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    strategy: str = "auto"
    group_split: int = 0
    dlse: torch.Tensor | None = None

    @property
    def signature(self) -> tuple:
        """All that the host may decide by: shapes, dtypes, devices and values, no contents.

        None stands for what is no tensor, as which PyTorch takes None.
        """
        signature = [*self[10:14], self.strategy, self.group_split]
        for t in (*self[:8], self.seqused_q, self.seqused_k, self.dlse):
            signature += (None,) if t is None else (t.shape, t.dtype, t.device)
        return tuple(signature)
