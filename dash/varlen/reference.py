"""The packed backward on the CPU: the dense one on each sequence alone.

The oracle of the packed kernels: what it returns is by construction what the dense call returns.
Sequences of equal lengths go into one dense batch, whose sequences do not see each other.
"""

from __future__ import annotations

import torch

from dash.varlen.call import PackedCall
from dash.varlen.sequences import sequences_by_length

# Bounds the memory: the dense implementation pads each sequence to whole tiles, in fp64.
_SEQUENCES_AT_ONCE = 256


def attention_varlen_bwd(call: PackedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of the packed call; zeros in rows that belong to no sequence.

    Raises:
        UnsupportedError: ``cu_seqlens`` or ``seqused`` do not describe a pack, or a sequence alone
            is not supported.
    """
    grads = tuple(t.new_zeros(t.shape) for t in (call.q, call.k, call.v))
    for sequences in sequences_by_length(
        call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k,
        call.q.shape[0], call.k.shape[0],
    ):  # fmt: skip
        if not sequences.empty:
            sides = sequences.rows_q, sequences.rows_k
            for rows in zip(*(rows.split(_SEQUENCES_AT_ONCE) for rows in sides), strict=True):
                _dense_batch(call, *rows, grads)
    return grads


def _dense_batch(
    call: PackedCall,
    rows_q: torch.Tensor,
    rows_k: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Writes the gradients of sequences that are a batch: rows ``(batch, seqlen)``."""
    lse, dlse = (  # (batch, heads, seqlen_q)
        None if t is None else t[:, rows_q].movedim(0, 1) for t in (call.softmax_lse, call.dlse)
    )
    of_batch = torch.ops.dash.attention_bwd(
        call.dout[rows_q], call.q[rows_q], call.k[rows_k], call.v[rows_k], call.out[rows_q], lse,
        call.softmax_scale, call.causal, call.strategy, call.group_split, call.window_left,
        call.window_right, **({} if dlse is None else {"dlse": dlse}),
    )  # fmt: skip
    for grad, rows, part in zip(grads, (rows_q, rows_k, rows_k), of_batch, strict=True):
        grad[rows] = part
