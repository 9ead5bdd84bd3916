"""Attention problems as benchmarks name them: dense or packed, with causal mask and windows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

TOKENS = 16_384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
GQA_HEADS = ((32, 8), (28, 4))
GQA_TOKENS = 8192
GQA_SEQLENS = (2048, 4096, 8192, 16_384)

COLUMNS = (
    "batch", "seqlen", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "causal",
    "window_left", "window_right", "lengths", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One attention problem.

    Attributes:
        batch: sequences.
        seqlen: query rows of a sequence; of the longest one where ``lengths`` is given.
        heads, kv_heads, head_dim: of q; of k and v; of q and k.
        causal: aligned bottom-right.
        seqlen_k: key rows of a sequence, as many as ``seqlen`` where 0.
        head_dim_v: of v, out and dout, as ``head_dim`` where 0.
        window_left, window_right: keys visible to either side; None is unlimited.
        lengths: of packed sequences, q and k alike; empty for a dense problem.
        dtype: ``bfloat16`` or ``float16``.
    """

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    seqlen_k: int = 0
    head_dim_v: int = 0
    window_left: int | None = None
    window_right: int | None = None
    lengths: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.seqlen_k:
            object.__setattr__(self, "seqlen_k", self.seqlen)
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.lengths and (len(self.lengths), max(self.lengths)) != (self.batch, self.seqlen):
            raise ValueError(f"{self.lengths}: batch and seqlen are those of the lengths")

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    @property
    def windowed(self) -> bool:
        return self.window_left is not None or self.window_right is not None

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading sizes of q and out: ``(batch, seqlen)``, packed ``(total_q,)``."""
        return (sum(self.lengths),) if self.packed else (self.batch, self.seqlen)

    @property
    def rows_k(self) -> tuple[int, ...]:
        return (sum(self.lengths),) if self.packed else (self.batch, self.seqlen_k)

    @property
    def q_shape(self) -> tuple[int, ...]:
        return *self.rows, self.heads, self.head_dim

    @property
    def k_shape(self) -> tuple[int, ...]:
        return *self.rows_k, self.kv_heads, self.head_dim

    @property
    def v_shape(self) -> tuple[int, ...]:
        return *self.rows_k, self.kv_heads, self.head_dim_v

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.rows, self.heads, self.head_dim_v

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(query rows, key rows) of each sequence."""
        if self.packed:
            return tuple((length, length) for length in self.lengths)
        return ((self.seqlen, self.seqlen_k),) * self.batch

    @property
    def pairs(self) -> float:
        """Query rows times the keys that each sees, one head, all sequences."""
        return sum(
            visible_pairs(q, k, self.causal, self.window_left, self.window_right)
            for q, k in self.sequences
        )

    @property
    def flops(self) -> float:
        """Of the backward: five products over the visible pairs, two operations each.

        Three of them (S, dQ, dK) are over ``head_dim``, two (dP, dV) over ``head_dim_v``.
        """
        return 2.0 * self.heads * self.pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def group(self) -> str:
        """What a family of lengths has in common."""
        dims = f"D{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f":{self.head_dim_v}"
        heads = "" if self.heads == self.kv_heads else f" GQA {self.heads}/{self.kv_heads}"
        kind = "packed " if self.packed else ""
        return f"{kind}{'causal' if self.causal else 'full'}{self._window} {dims}{heads}"

    @property
    def _window(self) -> str:
        if not self.windowed:
            return ""
        if self.causal and not self.window_right:
            return f" window {self.window_left}"
        left, right = ("∞" if w is None else w for w in (self.window_left, self.window_right))
        return f" window {left}+{right}"

    def __str__(self) -> str:
        if self.packed:
            return f"{self.group} {short_lengths(self.lengths)}"
        more = "" if self.seqlen == self.seqlen_k else f"x{self.seqlen_k}"
        return f"{self.group} S{self.seqlen}{more}"

    def columns(self) -> dict[str, object]:
        """The shape as cells of a CSV row; ``from_columns`` reads them."""
        cells: dict[str, object] = {name: getattr(self, name) for name in COLUMNS}
        cells["causal"] = int(self.causal)
        cells["lengths"] = written_lengths(self.lengths)
        return {name: "" if cell is None else cell for name, cell in cells.items()}


def from_columns(row: Mapping[str, str]) -> Shape:
    """Reads ``Shape.columns``; columns that older files lack keep their defaults."""

    def number(name: str, default: int | None) -> int | None:
        return int(row[name]) if row.get(name) else default

    return Shape(
        batch=int(row["batch"]),
        seqlen=int(row["seqlen"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        causal=bool(int(row["causal"])),
        seqlen_k=number("seqlen_k", 0),
        head_dim_v=number("head_dim_v", 0),
        window_left=number("window_left", None),
        window_right=number("window_right", None),
        lengths=read_lengths(row.get("lengths") or ""),
        dtype=row.get("dtype") or "bfloat16",
    )


def written_lengths(lengths: tuple[int, ...]) -> str:
    """``8192 64x128``: equal neighbours are counted."""
    runs = ((length, len(list(run))) for length, run in itertools.groupby(lengths))
    return " ".join(str(length) if n == 1 else f"{n}x{length}" for length, n in runs)


def read_lengths(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split():
        count, _, length = word.rpartition("x")
        found += [int(length)] * int(count or 1)
    return tuple(found)


def short_lengths(lengths: tuple[int, ...]) -> str:
    written = written_lengths(lengths)
    if len(written) <= 16:
        return written
    return f"{len(lengths)} of {min(lengths)} to {max(lengths)}"


@functools.cache
def visible_pairs(
    seqlen_q: int, seqlen_k: int, causal: bool, left: int | None, right: int | None
) -> float:
    """Pairs of a query row and a key that it sees, in one head of one sequence.

    Without a window a causal mask counts as half a square, as published benchmarks count; with one
    every pair is counted.
    """
    if left is None and right is None:
        if not causal:
            return seqlen_q * seqlen_k
        if seqlen_q <= seqlen_k:
            return seqlen_q * seqlen_k - seqlen_q**2 / 2
        return seqlen_k**2 / 2
    offset = seqlen_k - seqlen_q
    ahead = 0 if causal else right
    total = 0
    for row in range(offset, offset + seqlen_q):
        first = 0 if left is None else max(0, row - left)
        last = seqlen_k - 1 if ahead is None else min(seqlen_k - 1, row + ahead)
        total += max(0, last - first + 1)
    return total


def packed_shape(
    lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, causal: bool
) -> Shape:
    return Shape(
        len(lengths), max(lengths), heads, kv_heads, head_dim, causal, lengths=tuple(lengths)
    )


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
