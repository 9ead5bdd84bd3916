"""Transformer blocks of the models that the DASH paper timed, from PyTorch's own parts.

Sizes are those of the published configurations. A block is norm, attention with the model's heads,
norm and MLP, each beside a residual. Left out, alike for every kernel: dropout, SAM's relative
positions, the second stream and the modulation of Stable Diffusion's joint blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dash.bench.shapes import Shape

# q (batch, seqlen, heads, head_dim), k and v with kv_heads → out like q; causal or not is its own.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockModel:
    """One model's block.

    Attributes:
        name: of the preset, too.
        hidden, heads, kv_heads, head_dim: widths; heads · head_dim may differ from hidden.
        causal: its mask.
        norm: ``rms`` or ``layer``.
        mlp, mlp_hidden: ``swiglu``, ``gelu`` or ``experts`` (8 of swiglu, 2 a token), and width.
        bias: of q, k and v.
        rotary: whether positions turn q and k.
        cases: (batch, seqlen) to be timed.
        paper: the paper's gain over deterministic FlashAttention-3, as it says it.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    norm: str
    mlp: str
    mlp_hidden: int
    bias: bool
    rotary: bool
    cases: tuple[tuple[int, int], ...]
    paper: str

    def shape(self, batch: int, seqlen: int) -> Shape:
        return Shape(batch, seqlen, self.heads, self.kv_heads, self.head_dim, self.causal)


LONG = ((1, 8192), (1, 16_384), (1, 32_768))
IMAGES = ((16, 4096),)
CAUSAL_GAIN = "about 5% on average, 2 to 10%"
FULL_GAIN = "about 4%"

BLOCK_MODELS = {
    model.name: model
    for model in (
        BlockModel("llama3-8b", 4096, 32, 8, 128, True, "rms", "swiglu", 14_336, False, True, LONG,
                   CAUSAL_GAIN),
        BlockModel("qwen2.5-7b", 3584, 28, 4, 128, True, "rms", "swiglu", 18_944, True, True, LONG,
                   CAUSAL_GAIN),
        BlockModel("mixtral-8x7b", 4096, 32, 8, 128, True, "rms", "experts", 14_336, False, True,
                   LONG, CAUSAL_GAIN),
        BlockModel("sd3.5", 2432, 38, 38, 64, False, "layer", "gelu", 9728, True, False, IMAGES,
                   FULL_GAIN),
        BlockModel("sam-h", 1280, 16, 16, 80, False, "layer", "gelu", 5120, True, False, IMAGES,
                   FULL_GAIN),
        BlockModel("llada-1b", 2048, 32, 4, 64, False, "rms", "swiglu", 5634, False, True, IMAGES,
                   FULL_GAIN),
    )
}  # fmt: skip


class Block(nn.Module):
    """``(batch, seqlen, hidden)`` → the same, with ``attention`` in its middle."""

    def __init__(self, model: BlockModel, attention: Attention) -> None:
        super().__init__()
        self.model, self.attention = model, attention
        norm = nn.RMSNorm if model.norm == "rms" else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(model.hidden), norm(model.hidden)
        self.sizes = [h * model.head_dim for h in (model.heads, model.kv_heads, model.kv_heads)]
        self.qkv = nn.Linear(model.hidden, sum(self.sizes), bias=model.bias)
        self.output = nn.Linear(self.sizes[0], model.hidden, bias=False)
        mlp = {"swiglu": SwiGlu, "gelu": Gelu, "experts": Experts}[model.mlp]
        self.mlp = mlp(model.hidden, model.mlp_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.model.head_dim))
            for t in self.qkv(self.attention_norm(x)).split(self.sizes, dim=-1)
        )
        if self.model.rotary:
            q, k = turned(q), turned(k)
        x = x + self.output(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of the two halves of each head, ``(batch, seqlen, heads, head_dim)``."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class SwiGlu(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Gelu(nn.Sequential):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__(nn.Linear(hidden, width), nn.GELU("tanh"), nn.Linear(width, hidden))


class Experts(nn.Module):
    """A mixture of ``COUNT`` experts, ``CHOSEN`` a token, no token dropped."""

    COUNT, CHOSEN = 8, 2

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, self.COUNT, bias=False)
        self.experts = nn.ModuleList(SwiGlu(hidden, width) for _ in range(self.COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1, dtype=torch.float32).topk(self.CHOSEN)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.COUNT).tolist()
        rows = Permuted.apply(tokens.repeat_interleave(self.CHOSEN, dim=0), order)
        parts = zip(self.experts, rows.split(counts), strict=True)
        mixed = torch.cat([expert(part) for expert, part in parts])
        back = Permuted.apply(mixed, order.argsort()).unflatten(0, (-1, self.CHOSEN))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)


class Permuted(torch.autograd.Function):
    """Rows in another order. PyTorch's own gradient of indexing adds, with atomics or a sort."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.saved_tensors[0].argsort()], None
