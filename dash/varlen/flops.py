"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the packed operators.

Two products forward and five backward, of 2 · heads · seqlen_q · seqlen_k · head_dim operations for
each sequence, masked or not. To count them the lengths are read, which waits for the device; where
they cannot be (fake tensors) all sequences are taken to be equally long.
"""

from __future__ import annotations

import torch
from torch import ops
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from dash.varlen.call import PackedCall
from dash.varlen.interface import Call


def attention_products(call: Call | PackedCall, over_k: int, over_v: int) -> int:
    """Operations of products over the pack: so many over the head_dim of k, and of v."""
    columns = over_k * call.k.shape[2] + over_v * call.v.shape[2]
    return 2 * call.q.shape[1] * columns * _pairs(call)


def _pairs(call: Call | PackedCall) -> int:
    """Pairs of a query and a key of the same sequence."""
    cu_seqlens = call.cu_seqlens_q, call.cu_seqlens_k
    if any(is_fake(t) or t.device.type == "meta" for t in cu_seqlens):
        return call.q.shape[0] * call.k.shape[0] // max(1, cu_seqlens[0].shape[0] - 1)
    lengths_q, lengths_k = (
        cu.long().diff() if used is None else used.long()
        for cu, used in zip(cu_seqlens, (call.seqused_q, call.seqused_k), strict=True)
    )
    return int(torch.dot(lengths_q, lengths_k))


@register_flop_formula(ops.dash.attention_varlen_fwd, get_raw=True)
def _fwd_flops(*arguments: object, out_val: object = None, **named: object) -> int:
    return attention_products(Call(*arguments, **named), 1, 1)


@register_flop_formula(ops.dash.attention_varlen_bwd, get_raw=True)
def _bwd_flops(*arguments: object, out_val: object = None, **named: object) -> int:
    return attention_products(PackedCall(*arguments, **named), 3, 2)
