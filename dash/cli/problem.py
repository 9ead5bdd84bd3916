"""Attention problems of the command line: their options and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import typer

import dash
from dash.bench import shapes as bench_shapes
from dash.device import default_device, dtype_name
from dash.forward import ForwardCall, run_forward

Batch = Annotated[int, typer.Option(help="Sequences.")]
Seqlen = Annotated[int, typer.Option(help="Query rows of a sequence.")]
SeqlenK = Annotated[int | None, typer.Option(help="Key rows of a sequence; as many as --seqlen.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads; as many as --heads.")]
HeadDim = Annotated[int, typer.Option(help="Of q and k, a multiple of 8 up to 192.")]
HeadDimV = Annotated[
    int | None, typer.Option(help="Of v, a multiple of 8 up to 128; that of q and k.")
]
DType = Annotated[str, typer.Option(help="bfloat16 or float16.")]
Causal = Annotated[bool, typer.Option(help="Bottom-right aligned causal mask, or none.")]
WindowLeft = Annotated[
    int | None, typer.Option(help="Keys that a query sees before its own place; all of them.")
]
WindowRight = Annotated[
    int | None, typer.Option(help="Keys that a query sees after its own place; all of them.")
]
Strategy = Annotated[str, typer.Option(help="A strategy, 'auto', or 'all'.")]
Seed = Annotated[int, typer.Option(help="Seed of the inputs.")]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """One attention; ``q`` is ``(batch, seqlen_q, heads, head_dim)``."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    window_left: int | None = None
    window_right: int | None = None
    head_dim_v: int | None = None

    @property
    def mask(self) -> dict[str, object]:
        """The mask as keyword arguments."""
        windows = {"window_left": self.window_left, "window_right": self.window_right}
        return {"causal": self.causal, **windows}

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_q, self.heads, self.head_dim

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_k, self.kv_heads, self.head_dim

    @property
    def of_v(self) -> int:
        """head_dim_v, given or not."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def __str__(self) -> str:
        heads = f"{self.heads}" + ("" if self.heads == self.kv_heads else f"/{self.kv_heads}")
        more = "" if self.seqlen_q == self.seqlen_k else f" x {self.seqlen_k}"
        mask = "causal" if self.causal else "full"
        if (self.window_left, self.window_right) != (None, None):
            sides = ("all" if w is None else str(w) for w in (self.window_left, self.window_right))
            mask += f", window {' + '.join(sides)}"
        dims = f"D{self.head_dim}" + ("" if self.of_v == self.head_dim else f":{self.of_v}")
        return (
            f"batch {self.batch}, seqlen {self.seqlen_q}{more}, heads {heads}, {dims}, "
            f"{mask}, {dtype_name(self.dtype)}"
        )


def shape_from_options(
    batch: int,
    seqlen: int,
    seqlen_k: int | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    dtype: str,
    causal: bool,
    window_left: int | None = None,
    window_right: int | None = None,
    head_dim_v: int | None = None,
) -> Shape:
    if dtype not in DTYPES:
        raise typer.BadParameter(
            f"{dtype!r}; required: {' or '.join(DTYPES)}", param_hint="--dtype"
        )
    return Shape(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen if seqlen_k is None else seqlen_k,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        head_dim_v=head_dim_v,
    )


def bench_shape(shape: Shape) -> bench_shapes.Shape:
    """The command line's problem as the benchmark's."""
    return bench_shapes.Shape(
        shape.batch,
        shape.seqlen_q,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.causal,
        seqlen_k=shape.seqlen_k,
        window_left=shape.window_left,
        window_right=shape.window_right,
        head_dim_v=shape.of_v,
        dtype=dtype_name(shape.dtype),
    )


def plans_asked(shape: Shape, strategy: str) -> list[dash.Plan]:
    """The plans of ``--strategy``: one, or for 'all' auto's first and then all that could run."""
    if strategy != "all":
        return [_plan(shape, strategy)]
    first = _plan(shape, "auto")
    return [first, *(_plan(shape, name) for name in first.alternatives)]


def _plan(shape: Shape, strategy: str) -> dash.Plan:
    more = {"strategy": strategy, "head_dim_v": shape.head_dim_v}
    return dash.plan(shape.q, shape.kv, shape.dtype, **shape.mask, **more)


@dataclass(frozen=True)
class Inputs:
    """What ``attention_bwd`` takes; layouts as there."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    causal: bool
    window_left: int | None = None
    window_right: int | None = None

    @property
    def mask(self) -> dict[str, object]:
        """The mask as keyword arguments."""
        windows = {"window_left": self.window_left, "window_right": self.window_right}
        return {"causal": self.causal, **windows}

    def forward_call(self) -> ForwardCall:
        """The forward that made out and softmax_lse."""
        return ForwardCall(self.q, self.k, self.v, self.q.shape[3] ** -0.5, **self.mask)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in the operator's order."""
        names = ("dout", "q", "k", "v", "out", "softmax_lse")
        return {name: getattr(self, name) for name in names}

    def backward(
        self, strategy: str, group_split: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv by ``torch.ops.dash.attention_bwd``."""
        order = {"strategy": strategy, "group_split": group_split}
        return torch.ops.dash.attention_bwd(*self.tensors().values(), **self.mask, **order)


def make_inputs(shape: Shape, seed: int, device: torch.device | None = None) -> Inputs:
    """Normal inputs, drawn on the CPU: the same values on every machine; then a forward pass."""
    device = default_device() if device is None else device
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(size, generator=generator).to(device, shape.dtype)
        for size in (shape.q, shape.kv, (*shape.kv[:3], shape.of_v), (*shape.q[:3], shape.of_v))
    )
    out, lse = run_forward(ForwardCall(q, k, v, shape.head_dim**-0.5, **shape.mask))
    return Inputs(dout, q, k, v, out, lse, **shape.mask)
