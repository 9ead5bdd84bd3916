"""FlashAttention-3's backward from the PyPI wheel ``flash-attn3-jax``, by an XLA FFI call of ours.

The wheel holds upstream's Hopper kernels for head dimension 128, bf16 and fp16, deterministic and
not, dense and packed, with windows. Its own Python never asks for the deterministic ones in dense
calls and rounds two workspaces to tiles of 128 rows, where the kernel for a full mask has 80 (wrong
gradients), so only its compiled module is used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
import time
from collections.abc import Callable

from dash.bench.inputs import Tensors
from dash.bench.measure import WARM_UP, Meter, Window, synchronize
from dash.bench.providers import Prepared, Unavailable, check
from dash.bench.shapes import Shape

HEAD_DIM = 128  # all that the wheel was built for
ROWS = 640  # a multiple of the q tiles' 64 rows (causal mask, windows) and 80 (full mask)
DISPATCHED_AHEAD = 8
NEEDS = ("jax", "flash_attn3_jax_lib")
TARGET = "flash_mha_bwd"


def missing() -> str | None:
    """None where the wheel can be called, else why not."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    return f"no module {' and no '.join(absent)}" if absent else None


def backward(
    dout: object,
    q: object,
    k: object,
    v: object,
    out: object,
    lse: object,
    *cu_seqlens: object,
    shape: Shape,
    deterministic: bool,
) -> tuple[object, ...]:
    """One call on JAX arrays, laid out as ``Tensors``; returns dq, dk, dv."""
    import jax
    import jax.numpy as jnp

    result = jax.ShapeDtypeStruct
    workspace = result(workspace_shape(shape), jnp.float32)
    results = [result(x.shape, x.dtype) for x in (q, k, v)] + [workspace] * 2
    none = jnp.zeros((0,), jnp.int32)
    starts = cu_seqlens * 2 if cu_seqlens else (none, none)  # of q and of k
    call = jax.ffi.ffi_call(TARGET, results, has_side_effect=True)
    left, right = (-1 if side is None else side for side in (shape.window_left, shape.window_right))
    return call(
        dout, q, k, v, out, lse, *starts, none, none,
        max_seqlen_q_val=shape.seqlen, max_seqlen_q_has_value=True,
        max_seqlen_k_val=shape.seqlen_k, max_seqlen_k_has_value=True,
        softmax_scale_val=shape.head_dim**-0.5, softmax_scale_has_value=True,
        is_causal=shape.causal, window_size_left=left,
        window_size_right=0 if shape.causal and shape.windowed else right,
        softcap=0.0, deterministic=deterministic, sm_margin=0,
    )[:3]  # fmt: skip


def workspace_shape(shape: Shape) -> tuple[int, ...]:
    """Of the kernel's two fp32 results beside the gradients: heads and rows in whole q tiles.

    Packed, every sequence may end in a part of a tile.
    """
    if not shape.packed:
        return shape.batch, shape.heads, -(-shape.seqlen // ROWS) * ROWS
    rows = sum(shape.lengths) + shape.batch * HEAD_DIM
    return shape.heads, -(-rows // ROWS) * ROWS


def register() -> None:
    """Makes the wheel's kernels known to XLA, once a process."""
    import jax
    from flash_attn3_jax_lib import flash_api

    capsule = flash_api.get_ffi_registrations()[TARGET]
    jax.ffi.register_ffi_target(TARGET, capsule, platform="CUDA")


class JaxFa3:
    """FA3 of the wheel as a provider; to be used in a process of its own (``dash.bench.worker``).

    XLA keeps most of the GPU's memory unless told otherwise before it starts, and its deterministic
    mode has been seen to hang.
    """

    def __init__(self, name: str, deterministic: bool, meter: Meter) -> None:
        self.name, self.deterministic, self._meter = name, deterministic, meter
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        # With two GPUs in sight JAX leaves another device current than the one of torch's tensors.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
        self._register = functools.cache(register)

    def prepare(self, shape: Shape, tensors: Tensors) -> Prepared:
        if (reason := cannot_run(shape)) is not None:
            raise Unavailable(reason)
        self._register()
        play = self._compiled(shape, tensors)
        version = f"flash-attn3-jax {importlib.metadata.version('flash-attn3-jax')}"
        return Prepared(lambda seconds: window_of(play, seconds, self._meter), version=version)

    def _compiled(self, shape: Shape, t: Tensors) -> Callable[[], object]:
        import jax
        import jax.numpy as jnp
        import torch

        synchronize()
        tensors = [t.dout, t.q, t.k, t.v, t.out, t.lse]
        tensors += [] if t.cu_seqlens is None else [t.cu_seqlens]
        arrays = [jnp.from_dlpack(x) for x in tensors]
        call = functools.partial(backward, shape=shape, deterministic=self.deterministic)
        program = jax.jit(call).lower(*arrays).compile()
        check(lambda: tuple(torch.from_dlpack(x) for x in program(*arrays)), t)
        return lambda: program(*arrays)

    def close(self) -> None:
        pass


def cannot_run(shape: Shape) -> str | None:
    if (shape.head_dim, shape.head_dim_v) != (HEAD_DIM, HEAD_DIM):
        return f"the wheel holds head dimension {HEAD_DIM} only"
    return None


def window_of(play: Callable[[], object], seconds: float, meter: Meter) -> Window:
    """Like ``measure.sustained_window``, by the host's clock: XLA has a stream of its own.

    Batches of calls are dispatched one ahead of the device, so dispatch is hidden.
    """
    import jax

    def batch() -> object:
        for _ in range(DISPATCHED_AHEAD):
            grads = play()
        return grads

    warm_up = time.perf_counter() + seconds * WARM_UP
    jax.block_until_ready(batch())
    while time.perf_counter() < warm_up:
        jax.block_until_ready(batch())
    energy, start, batches, clock = meter.joules(), time.perf_counter(), 0, math.nan
    waiting = None
    while batches == 0 or time.perf_counter() < start + seconds:
        dispatched = batch()
        batches += 1
        if waiting is not None:
            jax.block_until_ready(waiting)
            clock = meter.sm_clock()
        waiting = dispatched
    jax.block_until_ready(waiting)
    elapsed, energy = time.perf_counter() - start, meter.joules() - energy
    calls = batches * DISPATCHED_AHEAD
    return Window(elapsed * 1e3 / calls, clock, energy / calls)
