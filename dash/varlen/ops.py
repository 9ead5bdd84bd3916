"""``torch.ops.dash.attention_varlen_bwd``: the backward pass of attention over packed sequences.

::

    attention_varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
                         Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                         (Tensor | SymInt)? max_seqlen_q=None, (Tensor | SymInt)? max_seqlen_k=None,
                         float? softmax_scale=None, bool causal=False, int? window_left=None,
                         int? window_right=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
                         str strategy="auto", int group_split=0, Tensor? dlse=None)
        -> (Tensor dq, Tensor dk, Tensor dv)

``dash.varlen.call.PackedCall`` says what the arguments are. The bits of a sequence's gradients are
those of ``attention_bwd`` on that sequence alone. Rows that belong to no sequence (behind the last
entry, or behind ``seqused``) are zeros in all gradients. ``max_seqlen`` is taken because callers
have it, two ints or two 0-d tensors, and never looked at: grids and workspace follow from the
shapes. Nothing is read from the device, so a CUDA graph of the call may be replayed with other
lengths. The outputs are new and contiguous. docs/packed.md has the contract.
"""

from __future__ import annotations

import torch

from dash.derivatives import define_batching, define_without_derivative
from dash.varlen import checks, reference
from dash.varlen.call import PackedCall
from dash.varlen.launch import launch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NAME = "dash::attention_varlen_bwd"

# PyTorch has no type for "int or tensor", and an int argument takes a 0-d tensor by reading it from
# the device. So the overload for tensors comes first: overloads are tried in this order.
_MAX_SEQLEN = {_NAME: "Tensor?", f"{_NAME}.int_max_seqlen": "SymInt?"}


def _attention_varlen_bwd_fake(*arguments: object, **named: object) -> Gradients:
    call = PackedCall(*arguments, **named)
    return tuple(t.new_empty(t.shape) for t in (call.q, call.k, call.v))


def _attention_varlen_bwd_cpu(*arguments: object) -> Gradients:
    """The dense CPU implementation on each sequence alone: the oracle of the packed kernels."""
    call = PackedCall(*arguments)
    checks.check_call(call)
    return reference.attention_varlen_bwd(call)


def _attention_varlen_bwd_cuda(*arguments: object) -> Gradients:
    """Enqueues the kernels on the current stream of the tensors' device; waits for nothing."""
    return launch(PackedCall(*arguments))


for _name, _type in _MAX_SEQLEN.items():
    torch.library.define(
        _name,
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        f"{_type} max_seqlen_q=None, {_type} max_seqlen_k=None, float? softmax_scale=None, "
        "bool causal=False, int? window_left=None, int? window_right=None, "
        'Tensor? seqused_q=None, Tensor? seqused_k=None, str strategy="auto", int group_split=0, '
        "Tensor? dlse=None) -> (Tensor dq, Tensor dk, Tensor dv)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    torch.library.register_fake(_name)(_attention_varlen_bwd_fake)
    torch.library.impl(_name, "cpu", _attention_varlen_bwd_cpu)
    torch.library.impl(_name, "cuda", _attention_varlen_bwd_cuda)
    define_batching(_name, fold=False)

# As an autograd Function calls it, without bounds.
attention_varlen_bwd, _ = (
    define_without_derivative(_name, _attention_varlen_bwd_cuda) for _name in _MAX_SEQLEN
)
