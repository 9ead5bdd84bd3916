"""A Llama-like decoder for packed sequences: RMSNorm, rotary positions, GQA, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# attend(q (total, heads, head_dim), k, v (total, kv_heads, head_dim)) → like q; causal in each
# document.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of the model; ``SIZES`` names them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int


SIZES = {
    "100m": Size(12, 768, 12, 4, 64, 2816),
    "tiny": Size(2, 64, 4, 2, 16, 128),
}


class LanguageModel(nn.Module):
    """Logits of the next token for packed tokens."""

    def __init__(self, size: Size, vocabulary: int, recompute: bool = False) -> None:
        super().__init__()
        self.size, self.recompute = size, recompute
        self.embedding = nn.Embedding(vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """``(total,)`` tokens and positions → ``(total, vocabulary)`` fp32."""
        rotation = rotary(positions, self.size.head_dim)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, rotation, attend, use_reentrant=False)
            else:
                hidden = block(hidden, rotation, attend)
        return self.head(self.norm(hidden)).float()


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.attention_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.q = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.gate = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.up = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.hidden, bias=False)

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        x = self.attention_norm(hidden)
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v)
        )
        hidden = hidden + self.o(attend(rotate(q, rotation), rotate(k, rotation), v).flatten(1))
        x = self.feed_forward_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(x)) * self.up(x))


def rotary(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 ``(total, 1, head_dim / 2)``."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None] * 10_000.0**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``(total, heads, head_dim)``, rotated in fp32, in its dtype."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
