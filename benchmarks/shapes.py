"""The benchmark's problems: PERFORMANCE.md's grid, 16k tokens × 2,048, and GQA at 8k tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

TOKENS = 16_384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
GQA_HEADS = ((32, 8), (28, 4))
GQA_TOKENS = 8192
GQA_SEQLENS = (2048, 4096, 8192, 16_384)


@dataclass(frozen=True)
class Shape:
    """Self-attention in bf16: seqlen_q = seqlen_k = ``seqlen``."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen, self.kv_heads, self.head_dim

    @property
    def flops(self) -> float:
        """10·B·H·S²·D: five products, two operations each; half of it with the causal mask."""
        products = 10 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return products / 2 if self.causal else products

    @property
    def group(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = "" if self.heads == self.kv_heads else f" GQA {self.heads}/{self.kv_heads}"
        return f"{mask} D{self.head_dim}{heads}"

    def __str__(self) -> str:
        return f"{self.group} S{self.seqlen}"


def grid_shape(seqlen: int, head_dim: int, causal: bool) -> Shape:
    heads = HIDDEN // head_dim
    return Shape(max(1, TOKENS // seqlen), seqlen, heads, heads, head_dim, causal)


def select_shapes(
    masks: tuple[str, ...],
    head_dims: tuple[int, ...],
    seqlens: tuple[int, ...],
    gqa: bool,
) -> list[Shape]:
    """The part of the grid with these masks, head dimensions and lengths, GQA shapes last."""
    shapes = [
        grid_shape(seqlen, head_dim, mask == "causal")
        for head_dim, mask, seqlen in itertools.product(head_dims, masks, seqlens)
    ]
    if gqa:
        shapes += [
            Shape(max(1, GQA_TOKENS // seqlen), seqlen, heads, kv_heads, 128, True)
            for (heads, kv_heads), seqlen in itertools.product(GQA_HEADS, GQA_SEQLENS)
            if seqlen in seqlens
        ]
    return shapes


def parse_shape(text: str) -> Shape:
    """``batch,seqlen,heads,kv_heads,head_dim,causal`` → a shape; causal is 0 or 1."""
    *sizes, causal = (int(part) for part in text.split(","))
    return Shape(*sizes, bool(causal))
