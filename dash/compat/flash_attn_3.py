"""FlashAttention-3's Python module, ``flash_attn_interface``, with dash's backward under it.

Names, order and defaults of the arguments are FlashAttention-3's, the misspelled ``sequed_q`` of
``_flash_attn_backward`` included, because TransformerEngine and ring attention call by keyword and
by position. Tensors are ``(batch, seqlen, heads, head_dim)``, or packed ``(total, heads,
head_dim)`` with int32 ``cu_seqlens`` on the tensors' device. ``window_size`` is ``(left, right)``,
-1 unlimited.

``deterministic=False`` is accepted and changes nothing. ``num_splits``, ``pack_gqa`` and
``sm_margin`` steer FlashAttention-3's kernels, never its results: dash accepts them and has no use
for them. Every other argument that asks for what dash cannot do raises ``dash.UnsupportedError``.

Use it as a module, or let code that imports ``flash_attn_interface`` find it::

    handle = dash.compat.flash_attn_3.install()   # handle.remove() puts things back
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch

import dash
from dash.compat.arguments import refuse, window
from dash.forward import fa3_package
from dash.support import UnsupportedError

_NAME, _PACKAGE = "flash_attn_interface", "flash_attn_3"
_NEUTRAL = {"attention_chunk": 0, "softcap": 0.0, "rotary_interleaved": True}


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
    """``out``, or ``(out, lse)`` with ``return_attn_probs``; lse fp32 ``(batch, heads, seqlen_q)``.

    Differentiable; layouts and limits as in ``dash.attention``.
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, softcap)
    return dash.attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_attn_probs,
        **window(*window_size),
    )


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
    """``flash_attn_func`` for packed sequences; lse is fp32 ``(heads, total_q)``.

    ``max_seqlen_q`` and ``max_seqlen_k`` are bounds, ints or tensors, and change no bit.
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, softcap)
    return dash.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_attn_probs,
        **window(*window_size),
    )


def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """``(out, softmax_lse, None, None)``, not differentiable; the last two are split-KV's.

    The forward that ``dash.attention`` takes. ``out_``, where given, holds ``out``.
    """
    _refuse(
        qv, q_descale, k_descale, v_descale, attention_chunk, softcap,
        k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary,
        rotary_interleaved=rotary_interleaved,
    )  # fmt: skip
    packed = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    packed |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    mask = {"causal": causal, **window(window_size_left, window_size_right)}
    with torch.no_grad():
        if _is_packed(q, cu_seqlens_q, cu_seqlens_k):
            out, lse = dash.attention_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale,
                return_lse=True, **packed, **mask,
            )  # fmt: skip
        else:
            refuse({"seqused_q": seqused_q, "seqused_k": seqused_k}, {})
            out, lse = dash.attention(q, k, v, softmax_scale=softmax_scale, return_lse=True, **mask)
        if out_ is not None:
            out = out_.copy_(out)
    return out, lse, None, None


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    """Writes the gradients into ``dq``, ``dk``, ``dv``, where given, whatever their strides.

    ``out`` and ``softmax_lse`` may be those of a longer key sequence than ``k``: then the gradients
    are the parts that these keys contribute, and parts add up to the whole (ring attention).
    A given gradient may be of any floating dtype; its values are those of ``q``'s dtype.

    Returns:
        softmax_d: fp32 rowsum of dout ∘ out, of the shape of ``softmax_lse``.
    """
    refuse({"softcap": softcap}, _NEUTRAL)
    mask = {"causal": is_causal, **window(window_size_left, window_size_right)}
    if _is_packed(q, cu_seqlens_q, cu_seqlens_k):
        grads = torch.ops.dash.attention_varlen_bwd(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
            seqused_q=sequed_q, seqused_k=sequed_k, softmax_scale=softmax_scale, **mask,
        )  # fmt: skip
    else:
        refuse({"sequed_q": sequed_q, "sequed_k": sequed_k}, {})
        grads = torch.ops.dash.attention_bwd(
            dout, q, k, v, out, softmax_lse, softmax_scale=softmax_scale, **mask
        )
    for wanted, grad in zip((dq, dk, dv), grads, strict=True):
        if wanted is not None:
            wanted.copy_(grad)
    return (dout.float() * out).sum(-1).transpose(-1, -2)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Exists because callers import it; raises: dash trains, and has no KV cache."""
    raise UnsupportedError(
        ["flash_attn_with_kvcache decodes with a KV cache; required: flash_attn_func or "
         "flash_attn_varlen_func"]
    )  # fmt: skip


class Installed:
    """What ``install`` changed; ``remove`` puts it back."""

    def __init__(self, before: dict[str, ModuleType | None]) -> None:
        self._before = before

    def remove(self) -> None:
        for name, module in self._before.items():
            if sys.modules.get(name) is not sys.modules[__name__]:
                continue
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def install() -> Installed:
    """Makes ``import flash_attn_interface`` give this module, in this process.

    Also ``flash_attn_3.flash_attn_interface``, the copy that TransformerEngine asks people to make
    of the real one, where there is a package ``flash_attn_3``. Where the real package is installed,
    it stays the forward pass that dash calls. Code that has imported names from it before keeps
    those names.
    """
    fa3_package()  # from now on dash knows the real one, or that there is none
    names = [_NAME] + ([f"{_PACKAGE}.{_NAME}"] if importlib.util.find_spec(_PACKAGE) else [])
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= dict.fromkeys(names, sys.modules[__name__])
    return Installed(before)


def _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, softcap, **more) -> None:
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given |= {"attention_chunk": attention_chunk, "softcap": softcap}
    refuse(given | more, _NEUTRAL)


def _is_packed(q, cu_seqlens_q, cu_seqlens_k) -> bool:
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise UnsupportedError(
            ["one of cu_seqlens_q and cu_seqlens_k is given; required: both or none"]
        )
    return cu_seqlens_q is not None
