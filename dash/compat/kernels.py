"""The ``kernels`` package's route into transformers, TRL and whoever asks for FlashAttention.

``python -m dash kernels FOLDER`` writes a kernel folder of two text files a backend. With it in the
environment, ``attn_implementation="flash_attention_3"`` runs dash in programs that nobody changes::

    export LOCAL_KERNELS="kernels-community/vllm-flash-attn3=FOLDER"

transformers inspects the signatures of these functions and *leaves out* what they do not name,
sinks and dropout too, without a word. So they name both: dash trains sinks, and dropout raises.
"""

from __future__ import annotations

import json
from pathlib import Path

import dash
from dash.compat.arguments import refuse, sink, window
from dash.compat.flash_attn_3 import flash_attn_with_kvcache

# What transformers 5 loads for flash_attention_3 and for gpt-oss, and earlier releases loaded.
REPOSITORIES = ("kernels-community/vllm-flash-attn3", "kernels-community/flash-attn3")

_NEUTRAL = {"dropout_p": 0.0, "softcap": 0.0}
_INIT = '''"""dash for users of the kernels package; written by python -m dash kernels."""

from dash.compat.kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "write"]


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    dropout_p=0.0,
    deterministic=True,
    s_aux=None,
    return_attn_probs=False,
):
    """``dash.attention`` of ``(batch, seqlen, heads, head_dim)``; ``s_aux`` is its ``sink``."""
    refuse({"softcap": softcap, "dropout_p": dropout_p}, _NEUTRAL)
    return dash.attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_attn_probs,
        **window(*window_size),
        **sink(s_aux),
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    dropout_p=0.0,
    deterministic=True,
    s_aux=None,
    return_attn_probs=False,
):
    """``dash.attention_varlen`` of ``(total, heads, head_dim)``; ``s_aux`` is its ``sink``."""
    refuse({"softcap": softcap, "dropout_p": dropout_p}, _NEUTRAL)
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
        **sink(s_aux),
    )


def write(folder: str | Path) -> str:
    """Writes the kernel folder, over an earlier one, and returns the value of LOCAL_KERNELS."""
    folder = Path(folder).resolve()
    for backend in ("cuda", "cpu"):
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        metadata = {
            "name": "dash-attention",
            "id": f"dash_attention_{dash.__version__.replace('.', '_')}_{backend}",
            "version": 1,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "__init__.py").write_text(_INIT)
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return ":".join(f"{name}={folder}" for name in REPOSITORIES)
