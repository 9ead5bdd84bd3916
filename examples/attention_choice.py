"""The attention of a run: dash's, or PyTorch's for the contrast."""

from __future__ import annotations

import torch
from language_model import Attend, Size
from packed_text import Pack
from torch.nn import functional

import dash
from dash.varlen.forward import Pack as ForwardCall
from dash.varlen.forward import choose_forward

ATTENTIONS = ("dash", "sdpa")


def attention_of(name: str, pack: Pack, forward: str, strategy: str) -> Attend:
    """Causal attention in each document of a pack."""

    def attend_dash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dash.attention_varlen(
            q,
            k,
            v,
            pack.cu_seqlens,
            max_seqlen_q=max(pack.lengths),
            max_seqlen_k=max(pack.lengths),
            causal=True,
            forward=forward,
            strategy=strategy,
        )

    def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # PyTorch's public function has no packed sequences: a call for each document.
        documents = (t.transpose(0, 1)[None].split(pack.lengths, dim=2) for t in (q, k, v))
        outs = [
            functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            for qkv in zip(*documents, strict=True)
        ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)

    return {"dash": attend_dash, "sdpa": attend_sdpa}[name]


def describe(name: str, pack: Pack, size: Size, forward: str, strategy: str) -> dict[str, object]:
    """What attention's bits of a step depend on, for the log: its forward, and the sums' order."""
    if name != "dash":
        return {}
    total, device = len(pack.tokens), pack.tokens.device
    shapes = [(total, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    plan = dash.plan_varlen(
        *shapes, torch.bfloat16, seqlens_q=pack.lengths, causal=True, strategy=strategy,
        device=device,
    )  # fmt: skip
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in (
        shapes[0], shapes[1], shapes[1]))  # fmt: skip
    call = ForwardCall(
        q, k, v, pack.cu_seqlens, pack.cu_seqlens, max(pack.lengths), max(pack.lengths),
        size.head_dim**-0.5, True, None, None, None, None,
    )  # fmt: skip
    return {"forward": choose_forward(call, forward), "fingerprint": plan.fingerprint}
