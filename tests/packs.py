"""Packs of sequences for tests: tensors, the packed call, and the dense call of each alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dash.forward import plain_forward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

NAMES = ("dout", "q", "k", "v", "out", "softmax_lse")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PackShape:
    """A pack. ``lengths`` are (seqlen_q, seqlen_k) of each sequence.

    ``gaps`` are rows of each sequence's space behind its own, for q and for k; ``tails`` are rows
    behind the last sequence.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    gaps: tuple[int, int] = (0, 0)
    tails: tuple[int, int] = (0, 0)
    head_dim_v: int | None = None  # None: head_dim

    def total(self, side: int) -> int:
        return sum(s[side] + self.gaps[side] for s in self.lengths) + self.tails[side]

    def starts(self, side: int) -> list[int]:
        """``cu_seqlens`` of q (0) or k (1)."""
        return _starts(self.lengths, self.gaps, side)

    @property
    def mask(self) -> dict[str, object]:
        windows = {"window_left": self.window_left, "window_right": self.window_right}
        return {"causal": self.causal} | {n: w for n, w in windows.items() if w is not None}

    def __str__(self) -> str:
        lengths = "+".join(f"{q}" if q == k else f"{q}x{k}" for q, k in self.lengths[:4])
        more = f"+{len(self.lengths) - 4}more" if len(self.lengths) > 4 else ""
        mask = "causal" if self.causal else "full"
        window = "" if len(self.mask) == 1 else f"-w{self.window_left},{self.window_right}"
        extras = "-gaps" * any(self.gaps) + "-tails" * any(self.tails)
        of_v = f":{self.head_dim_v}" if self.head_dim_v else ""
        heads = f"h{self.heads}-{self.kv_heads}-d{self.head_dim}{of_v}"
        return f"{lengths}{more}-{heads}-{mask}{window}{extras}"


@functools.lru_cache
def _starts(lengths: tuple, gaps: tuple[int, int], side: int) -> list[int]:
    return list(itertools.accumulate((s[side] + gaps[side] for s in lengths), initial=0))


@dataclass
class Pack:
    """A pack's tensors. Rows of no sequence hold NaN in every one of them."""

    shape: PackShape
    tensors: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]

    def gradients(self, strategy: str = "auto", group_split: int = 0, **more: object) -> Gradients:
        """dq, dk, dv by the packed operator."""
        return torch.ops.dash.attention_varlen_bwd(
            *self.tensors.values(), softmax_scale=self.shape.scale, strategy=strategy,
            group_split=group_split, **self.lengths, **self.shape.mask, **more,
        )  # fmt: skip

    def rows(self, index: int, side: int) -> slice:
        start = self.shape.starts(side)[index]
        return slice(start, start + self.shape.lengths[index][side])

    def alone(self, index: int) -> dict[str, torch.Tensor]:
        """The dense arguments of one sequence, batch 1."""
        q, k = self.rows(index, 0), self.rows(index, 1)
        rows = {"dout": q, "q": q, "k": k, "v": k, "out": q}
        dense = {name: self.tensors[name][rows[name]][None] for name in rows}
        return dense | {"softmax_lse": self.tensors["softmax_lse"][:, q][None]}

    def dense(self, index: int, strategy: str = "auto", group_split: int = 0) -> Gradients:
        """dq, dk, dv of one sequence by the dense operator, without the batch dimension."""
        grads = torch.ops.dash.attention_bwd(
            *self.alone(index).values(), self.shape.scale, strategy=strategy,
            group_split=group_split, **self.shape.mask,
        )  # fmt: skip
        return tuple(g[0] for g in grads)

    def sequences_of(self, grads: Gradients) -> Iterator[Gradients]:
        """The gradients of each sequence."""
        dq, dk, dv = grads
        for index in range(len(self.shape.lengths)):
            q, k = self.rows(index, 0), self.rows(index, 1)
            yield dq[q], dk[k], dv[k]

    def rows_of_none(self, side: int) -> torch.Tensor:
        """bool ``(total,)``, true for rows of no sequence."""
        spaces, gap = [s[side] for s in self.shape.lengths], self.shape.gaps[side]
        inside = [belongs for n in spaces for belongs in (*(True,) * n, *(False,) * gap)]
        inside += [False] * self.shape.tails[side]
        return ~torch.tensor(inside, dtype=torch.bool, device=self.tensors["q"].device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of 16-bit tensors by bits: NaN equals itself, 0 does not equal -0."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def all_same(a: Gradients, b: Gradients) -> bool:
    return all(map(same_bits, a, b))


def assert_bits_of_dense(pack: Pack, grads: Gradients, strategy: str = "auto", split: int = 0):
    """Each sequence has its dense call's bits; rows of no sequence are exact zeros."""
    for index, got in enumerate(pack.sequences_of(grads)):
        if 0 in pack.shape.lengths[index]:
            assert all(not t.any() for t in got), f"sequence {index} is empty, not zero"
            continue
        wanted = pack.dense(index, strategy, split)
        for name, x, y in zip(("dq", "dk", "dv"), got, wanted, strict=True):
            assert same_bits(x, y), f"{name} of sequence {index}, {pack.shape.lengths[index]}"
    for grad, side in zip(grads, (0, 1, 1), strict=True):
        outside = grad[pack.rows_of_none(side)]
        assert not outside.view(torch.int16).any(), "rows of no sequence are not zeros"


def length_tensors(shape: PackShape, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """cu_seqlens, and seqused where the shape has gaps."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths = {f"cu_seqlens_{s}": int32(shape.starts(i)) for i, s in enumerate("qk")}
    for i, side in enumerate("qk"):
        if shape.gaps[i]:
            lengths[f"seqused_{side}"] = int32([s[i] for s in shape.lengths])
    return lengths


def random_pack(shape: PackShape, seed: int = 0, device: torch.device = CPU) -> Pack:
    """Normal tensors; out belongs to no forward, lse is of the size of one. For bits only."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    totals = shape.total(0), shape.total(1)
    dims = shape.head_dim, shape.head_dim_v or shape.head_dim
    dout, q, out = (normal(totals[0], shape.heads, dims[i]) for i in (1, 0, 1))
    k, v = (normal(totals[1], shape.kv_heads, head_dim) for head_dim in dims)
    keys = max((s[1] for s in shape.lengths), default=1)
    lse = normal(shape.heads, totals[0], dtype=torch.float32) * 0.25 + math.log(keys + 1) + 0.5
    tensors = dict(zip(NAMES, (dout, q, k, v, out, lse), strict=True))
    pack = Pack(shape, tensors, length_tensors(shape, device))
    poison_rows_of_none(pack)
    return pack


def poison_rows_of_none(pack: Pack, value: float = torch.nan) -> None:
    for name, t in pack.tensors.items():
        if name == "softmax_lse":
            t[:, pack.rows_of_none(0)] = value
        else:
            t[pack.rows_of_none(1 if name in "kv" else 0)] = value


def attended_pack(shape: PackShape, seed: int = 0, device: torch.device = CPU) -> Pack:
    """A random pack whose out and lse are those of a forward of each sequence."""
    pack = random_pack(shape, seed, device)
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    windows = {name: w for name, w in shape.mask.items() if name != "causal"}
    for index, (seqlen_q, seqlen_k) in enumerate(shape.lengths):
        if seqlen_q and seqlen_k:
            one, rows = pack.alone(index), pack.rows(index, 0)
            out, lse = plain_forward(one["q"], one["k"], one["v"], scale, shape.causal, **windows)
            pack.tensors["out"][rows], pack.tensors["softmax_lse"][:, rows] = out[0], lse[0]
    return pack


def with_order(pack: Pack, order: list[int]) -> Pack:
    """The same sequences in another order, without gaps or tails."""
    lengths = tuple(pack.shape.lengths[i] for i in order)
    shape = replace(pack.shape, lengths=lengths, gaps=(0, 0), tails=(0, 0))

    def packed(name: str) -> torch.Tensor:
        dim = 1 if name == "softmax_lse" else 0
        nothing = pack.tensors[name].narrow(dim, 0, 0)
        return torch.cat([nothing, *(pack.alone(i)[name][0] for i in order)], dim)

    tensors = {name: packed(name) for name in NAMES}
    return Pack(shape, tensors, length_tensors(shape, pack.tensors["q"].device))
