"""Problems for the GPU tests: a shape, its tensors, the strategies that may run it, the call.

``DASH_TEST_DEVICE=cpu`` runs what needs no GPU through dash's CPU implementation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from dash import _C

DEVICE = torch.device(os.environ.get("DASH_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
# CASES.md 5: (seqlen_q, seqlen_k), tile tails, skipped tiles that must still pass their turn on.
CASE_5_LENGTHS = (
    (1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (108, 256), (384, 256),
    (640, 128), (1023, 1024), (1024, 1023), (4096, 4096),
)  # fmt: skip
UNLIMITED = 2**30  # resident CTAs: leaves only the refusals that no chip could lift

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="streams, graphs and the allocator are the GPU's")

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One problem. ``scale`` None is the op's default, ``head_dim ** -0.5``; ``head_dim_v`` None is
    ``head_dim``."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    head_dim_v: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_q, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_k, self.kv_heads, self.head_dim

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        return *self.kv_shape[:3], self.head_dims[1]

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return *self.q_shape[:3], self.head_dims[1]

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.seqlen_q

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp16"
        mask = "causal" if self.causal else "full"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        scale = "" if self.scale is None else f"-scale{self.scale:g}"
        lengths = f"{self.seqlen_q}x{self.seqlen_k}"
        dims = f"{self.head_dim}" + (f":{self.head_dim_v}" if self.head_dim_v else "")
        return f"b{self.batch}-{lengths}-h{heads}-d{dims}-{mask}-{dtype}{scale}"


@dataclass(frozen=True)
class Inputs:
    """The op's arguments: (batch, seqlen, heads, head_dim); lse (batch, heads, seqlen_q)."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: float | None = None
    causal: bool = False

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.dout, self.q, self.k, self.v, self.out, self.lse

    def sequences(self, first: int, count: int = 1) -> Inputs:
        """The batch's sequences first … first + count - 1, as views."""
        parts = (t[first : first + count] for t in self.tensors())
        return Inputs(*parts, self.scale, self.causal)


def make_problem(shape: Shape, group_split: int = 1) -> _C.Problem:
    tile_q, tile_kv = _C.tile_shape(*shape.head_dims)
    return _C.Problem(
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        causal=shape.causal,
        tile_q=tile_q,
        tile_kv=tile_kv,
        group_split=group_split,
    )


def strategies_for(shape: Shape) -> list[str]:
    """The strategies that some chip could run this problem with."""
    problem = make_problem(shape)
    return [s for s in _C.strategies() if _C.why_not(s, problem, UNLIMITED) is None]


def with_strategies(shapes: Iterable[Shape]) -> list:
    """Parameters ``shape, strategy``: every shape with every strategy, strategies innermost."""
    return [
        pytest.param(shape, strategy, id=f"{shape}-{strategy}")
        for shape in shapes
        for strategy in strategies_for(shape)
    ]


def skip_if_refused(shape: Shape, strategy: str) -> None:
    """Skips where this chip has too few resident CTAs for the strategy."""
    if not ON_GPU:
        return
    dtype = "bfloat16" if shape.dtype == torch.bfloat16 else "float16"
    device = torch.cuda.current_device()
    refusal = _C.why_not(
        strategy, make_problem(shape), _C.resident_ctas(device, dtype, *shape.head_dims)
    )
    if refusal is not None:
        pytest.skip(refusal)


def random_inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Normal tensors and an lse of the size a forward would give; out belongs to no forward.

    Enough for tests of bits, at any size, and the same in every process.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=DEVICE, dtype=dtype)

    sizes = shape.out_shape, shape.q_shape, shape.out_shape, shape.kv_shape, shape.v_shape
    dout, q, out, k, v = (normal(size, shape.dtype) for size in sizes)
    lse = normal(shape.lse_shape, torch.float32) * 0.25 + math.log(shape.seqlen_k) + 0.5
    return Inputs(dout, q, k, v, out, lse, shape.scale, shape.causal)


def gradients(inputs: Inputs, strategy: str = "auto", group_split: int = 0) -> Gradients:
    """dq, dk, dv by the op under test."""
    order = strategy, group_split
    return torch.ops.dash.attention_bwd(*inputs.tensors(), inputs.scale, inputs.causal, *order)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a 16-bit tensor, so that NaNs compare and +0 is not -0."""
    return tensor.view(torch.int16)


def same_bits(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))
