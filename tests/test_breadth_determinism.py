"""1,000 equal repeats of each problem of the tables of packed sequences and windows.

Beside a stream that keeps the GPU busy. The problems are those of
``python -m dash bench --preset packed`` and ``--preset windows``; one is run by ``-k``:

    pytest tests/test_breadth_determinism.py -k "packed-d64 and repeats"
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_conditions import DifferentCalls, OtherStream
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import DEVICE, ON_GPU, Gradients
from pack_cases import pack_on_device
from packs import PackShape, random_pack

from dash.bench.presets import PRESETS
from dash.bench.shapes import Shape

pytestmark = pytest.mark.gpu

REPEATS = 1000 if ON_GPU else 2
NAMES = ("packed", "packed-d64", "windows", "windows-d64")
ROWS = [
    pytest.param(shape, id=f"{name}-{shape}".replace(" ", "_"))
    for name in NAMES
    for shape in PRESETS[name].shapes
]


def backward_of(shape: Shape) -> Callable[[], Gradients]:
    """The packed call, or a dense one with a window, on random tensors."""
    dtype = getattr(torch, shape.dtype)
    if shape.packed:
        lengths = tuple((n, n) for n in shape.lengths)
        heads = shape.heads, shape.kv_heads, shape.head_dim
        return pack_on_device(PackShape(lengths, *heads, shape.causal, dtype=dtype)).gradients
    alone = PackShape(
        ((shape.batch * shape.seqlen,) * 2,), shape.heads, shape.kv_heads, shape.head_dim,
        shape.causal, shape.window_left, shape.window_right, dtype,
    )  # fmt: skip
    pack = random_pack(alone, device=DEVICE)
    batched = {n: t.unflatten(0, (shape.batch, -1)) for n, t in pack.tensors.items()}
    lse = pack.tensors["softmax_lse"].unflatten(1, (shape.batch, -1)).transpose(0, 1)
    batched["softmax_lse"] = lse.contiguous()
    return lambda: torch.ops.dash.attention_bwd(*batched.values(), **alone.mask)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ROWS)
def test_repeats_beside_a_busy_stream(shape: Shape) -> None:
    call = backward_of(shape)
    load = OtherStream() if ON_GPU else None
    different = DifferentCalls(call())
    for _ in range(REPEATS):
        if load is not None:
            load.enqueue()
        different.add(call())
    assert different.count() == 0, f"{different.count()} tensors of {REPEATS} calls differ"
