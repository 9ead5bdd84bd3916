"""A layer of multi-head latent attention, small, as DeepSeek's models have it, and its training."""

from __future__ import annotations

import torch
from torch import nn

import dash

HIDDEN, HEADS, LATENT = 256, 4, 64
PLAIN, ROTARY, VALUES = 128, 64, 128  # columns of a head: q and k have the first two together


class LatentAttention(nn.Module):
    """q and k of 192 columns, v of 128; k and v come from one latent vector a token."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTARY), bias=False)
        self.compress = nn.Linear(HIDDEN, LATENT + ROTARY, bias=False)
        self.decompress = nn.Linear(LATENT, HEADS * (PLAIN + VALUES), bias=False)
        self.o = nn.Linear(HEADS * VALUES, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q_plain, q_rotary = self.q(x).unflatten(-1, (HEADS, -1)).split((PLAIN, ROTARY), -1)
        latent, k_rotary = self.compress(x).split((LATENT, ROTARY), -1)
        k_plain, v = self.decompress(latent).unflatten(-1, (HEADS, -1)).split((PLAIN, VALUES), -1)
        shared = turned(k_rotary[:, :, None]).expand(-1, -1, HEADS, -1)
        q = torch.cat([q_plain, turned(q_rotary)], -1)
        k = torch.cat([k_plain, shared], -1)
        return self.o(dash.attention(q, k, v, causal=True).flatten(2))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``(batch, seqlen, heads, ROTARY)``."""
    half = ROTARY // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * rates)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def train(device: torch.device, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after so many steps from one seed, and the losses."""
    torch.manual_seed(0)
    layer = LatentAttention().to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    generator = torch.Generator(device).manual_seed(1)
    x, target = (
        torch.randn(2, 300, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    losses = []
    for _ in range(steps):
        loss = (layer(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: p.detach().clone() for name, p in layer.named_parameters()}, losses
