"""The attention of a run: dash's, or PyTorch's for the contrast."""

from __future__ import annotations

import torch
from language_model import Attend, Size
from packed_text import Pack
from torch.nn import functional

import dash

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


def describe(name: str, pack: Pack, size: Size, strategy: str) -> dict[str, object]:
    """What names the order of a step's sums in attention, for the log."""
    if name != "dash":
        return {}
    shapes = ((len(pack.tokens), heads, size.head_dim) for heads in (size.heads, size.kv_heads))
    plan = dash.plan_varlen(
        *shapes, torch.bfloat16, seqlens_q=pack.lengths, causal=True, strategy=strategy,
        device=pack.tokens.device,
    )  # fmt: skip
    return {"fingerprint": plan.fingerprint}
