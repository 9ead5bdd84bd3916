"""The packed backward on the GPU: checks by signature, memory, and the call of the kernels.

A step of training calls with the same shapes in every layer, so what the host decides is remembered
by the call's signature. Nothing here reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dash.device import device_model, dtype_name
from dash.extension import extension
from dash.memory import contiguous, contiguous_copy, uninitialized_like
from dash.problem import head_dim_v
from dash.remembered import Remembered
from dash.support import UnsupportedError
from dash.varlen import checks
from dash.varlen.call import PackedCall

_TMA_ALIGNMENT_BYTES = 16
_TMA_STRIDE_ELEMENTS = 8  # 16 bytes of a 16-bit type

_VIEWS = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


@dataclass(frozen=True)
class Launch:
    """What the host decides for all calls of one signature.

    Attributes:
        arguments: those of ``_C.backward_varlen`` that hold no address.
        workspace_bytes: device memory beyond the outputs; 0: nothing to compute, all zeros.
    """

    arguments: dict[str, object]
    workspace_bytes: int


_launches: dict[tuple, Launch] = Remembered(1024)


def launch(call: PackedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, enqueued on the current stream of q's device."""
    signature = call.signature
    known = _launches.get(signature)
    if known is None:
        _launches[signature] = known = _decide(call)
    q, k, v = call.q, call.k, call.v
    if known.workspace_bytes == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # Copies live to the end of the function, so that the launch reads memory that is theirs; later
    # allocations on this stream come after it.
    inputs = [tma_ready(t) for t in (call.dout, q, k, v, call.out)]
    lengths = [
        None if t is None else contiguous(t)
        for t in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    ]
    grads = dq, dk, dv = uninitialized_like(q), uninitialized_like(k), uninitialized_like(v)
    # A bare storage: torch.use_deterministic_algorithms fills torch.empty with NaN, which would
    # cost a write of every fp32 dQ sum.
    workspace = torch.UntypedStorage(known.workspace_bytes, device=q.device)
    index = q.device.index
    of_rows = {"lse": call.softmax_lse}
    if call.dlse is not None:
        of_rows["dlse"] = call.dlse
    try:
        extension().backward_varlen(
            **known.arguments,
            **dict(zip(_VIEWS, [_view(t) for t in (*inputs, *grads)], strict=True)),
            **dict(zip(_LENGTHS, [0 if t is None else t.data_ptr() for t in lengths], strict=True)),
            **{name: (t.data_ptr(), *t.stride()) for name, t in of_rows.items()},
            workspace=workspace.data_ptr(),
            workspace_bytes=known.workspace_bytes,
            device=index,
            stream=torch._C._cuda_getCurrentRawStream(index),
        )
    except ValueError as error:  # what only the stream's context can say: too few SMs, for one
        raise UnsupportedError([str(error).removeprefix("dash: ")]) from error
    return dq, dk, dv


def _decide(call: PackedCall) -> Launch:
    checks.check_call(call)
    q, k = call.q, call.k
    batch = call.cu_seqlens_q.shape[0] - 1
    if batch == 0 or q.numel() == 0 or k.numel() == 0:
        return Launch({}, 0)
    shape = pack_arguments(
        tuple(q.shape), tuple(k.shape), call.causal, call.window_left, call.window_right,
        call.strategy, call.group_split, head_dim_v(q.shape, call.v.shape),
    )  # fmt: skip
    shape["batch"] = batch
    values = {
        "dtype": dtype_name(q.dtype),
        "softmax_scale": q.shape[2] ** -0.5 if call.softmax_scale is None else call.softmax_scale,
        # What the dense call would choose by, also where the stream's context has fewer SMs.
        "resident_ctas": device_model(q.device, q.dtype, q.shape[2], call.v.shape[2]).resident_ctas,
    }
    return Launch(shape | values, extension().varlen_workspace_bytes(**shape))


def pack_arguments(
    q_shape: tuple[int, int, int],
    kv_shape: tuple[int, int, int],
    causal: bool,
    window_left: int | None = None,
    window_right: int | None = None,
    strategy: str = "auto",
    group_split: int = 0,
    head_dim_v: int | None = None,
) -> dict[str, object]:
    """What ``_C.backward_varlen`` and ``_C.varlen_workspace_bytes`` are told but the batch."""
    total_q, heads, head_dim = q_shape
    total_k, kv_heads, _ = kv_shape
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "total_q": total_q,
        "total_k": total_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        "causal": causal,
        "window_left": -1 if window_left is None else window_left,
        "window_right": -1 if window_right is None else window_right,
        "strategy": strategy,
        "group_split": group_split,
    }


def tma_ready(t: torch.Tensor) -> torch.Tensor:
    """``t`` ``(total, heads, head_dim)`` where TMA can read it as it lies, else a contiguous copy.

    As ``dash.ops.tma_ready``: no gaps in the last dimension, a 16-byte aligned base, strides that
    are positive multiples of 16 bytes.
    """
    row, head, last = t.stride()
    strides_fit = last == 1 and (
        (row > 0 and head > 0 and (row | head) % _TMA_STRIDE_ELEMENTS == 0)
        or all(
            size == 1 or (stride > 0 and stride % _TMA_STRIDE_ELEMENTS == 0)
            for size, stride in zip(t.shape, (row, head), strict=False)
        )
    )
    fits = strides_fit and t.data_ptr() % _TMA_ALIGNMENT_BYTES == 0
    return t if fits else contiguous_copy(t)


def _view(t: torch.Tensor) -> tuple[int, int, int]:
    """(address, row_stride, head_stride) in elements.

    The stride of a dimension of size 1 is never used and may hold anything, but a TMA descriptor
    checks it: it becomes the stride of a contiguous tensor.
    """
    rows, heads, head_dim = t.shape
    row_stride, head_stride, _ = t.stride()
    return (
        t.data_ptr(),
        heads * head_dim if rows == 1 else row_stride,
        head_dim if heads == 1 else head_stride,
    )
