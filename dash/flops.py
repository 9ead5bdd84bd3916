"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for dash's operators.

As for ``scaled_dot_product_attention``: two products forward and five backward, of
2 · batch · heads · seqlen_q · seqlen_k · head_dim operations each, masked or not. One and three of
them are over the head_dim of q and k, one and two over that of v.
"""

from __future__ import annotations

from torch import ops
from torch.utils.flop_counter import register_flop_formula

from dash import interface  # noqa: F401  defines the operators

Shape = tuple[int, int, int, int]


def attention_product(q_shape: Shape, kv_shape: Shape) -> int:
    """Operations of one product over the head_dim of ``kv_shape``, that of k or of v."""
    batch, seqlen_q, heads, _ = q_shape
    return 2 * batch * heads * seqlen_q * kv_shape[1] * kv_shape[3]


@register_flop_formula(ops.dash.attention_fwd)
def _attention_fwd_flops(q: Shape, k: Shape, v: Shape, *rest: object, **more: object) -> int:
    return attention_product(q, k) + attention_product(q, v)


@register_flop_formula(ops.dash.attention_bwd)
def _attention_bwd_flops(
    dout: Shape, q: Shape, k: Shape, v: Shape, *rest: object, **more: object
) -> int:
    return 3 * attention_product(q, k) + 2 * attention_product(q, v)
