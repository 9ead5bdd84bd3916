"""Packs that tests run: fixed ones, random ones, and what their gradients should be."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from inputs import DEVICE
from packs import Pack, PackShape, random_pack

# Ragged and even, tiles that are full and not, empty ones, more rows of q than of k and fewer.
LENGTHS = {
    "ragged": ((100, 100), (1, 1), (0, 0), (577, 577), (64, 64), (129, 129), (1000, 1000)),
    "unequal": ((100, 300), (300, 100), (0, 50), (50, 0), (1, 700), (700, 1), (128, 129)),
    "one long": ((2048, 2048), *((65, 65),) * 20),
    "many short": tuple((n % 90 + 1, n % 90 + 1) for n in range(0, 7 * 150, 7)),
    "one": ((1500, 1500),),
}
HEADS = ((4, 4), (8, 2), (6, 1))

_LENGTHS = st.integers(0, 140) | st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 257))
_HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 2))


def pack_on_device(shape: PackShape, seed: int = 0) -> Pack:
    return random_pack(shape, seed, DEVICE)


@st.composite
def pack_shapes(draw, max_sequences: int = 5, windows: bool = False) -> PackShape:
    same = draw(st.booleans())
    pairs = st.tuples(_LENGTHS, _LENGTHS)
    lengths = draw(st.lists(pairs, min_size=0, max_size=max_sequences))
    heads, kv_heads = draw(st.sampled_from(_HEADS))
    rows = st.sampled_from((0, 0, 1, 70))
    dims = (16, None), (64, None), (128, None), (192, 128), (136, 72), (48, 128)
    head_dim, head_dim_v = draw(st.sampled_from(dims))
    window = st.none() | st.sampled_from((0, 1, 20, 64, 130, 1000))
    return PackShape(
        lengths=tuple((q, q) if same else (q, k) for q, k in lengths),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=draw(st.booleans()),
        window_left=draw(window) if windows else None,
        window_right=draw(window) if windows else None,
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16))),
        gaps=(draw(rows), draw(rows)),
        tails=(draw(rows), draw(rows)),
    )


def strategies_of(shape: PackShape) -> list[str]:
    """auto, and the names that a packed call of this mask takes."""
    causal_only = ("descending", "spt", "zigzag", "serpentine")
    both = ["auto", "ascending", "staggered"]
    if shape.causal:
        return [*both, *causal_only]
    return both if len(shape.mask) > 1 else [*both, "shift"]


def fp64_gradients(pack: Pack, index: int) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of one sequence by autograd in fp64."""
    one = pack.alone(index)
    q, k, v = (one[n][0].double().transpose(0, 1).requires_grad_() for n in "qkv")
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).mT * q.shape[2] ** -0.5
    row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    right = 0 if pack.shape.causal else pack.shape.window_right
    column, left = torch.arange(k.shape[1]), pack.shape.window_left
    hidden = torch.zeros(len(row), len(column), dtype=torch.bool)
    if right is not None:
        hidden |= column > row + right
    if left is not None:
        hidden |= column < row - left
    p = scores.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0.0)
    out = p @ v.repeat_interleave(group, 0)
    grads = torch.autograd.grad(out, (q, k, v), one["dout"][0].double().transpose(0, 1))
    return tuple(g.transpose(0, 1) for g in grads)
