"""What dash can run, and a sentence for each thing that it cannot.

Everything is checked before anything is launched, in this order: device and architecture, dtype,
rank and layout, shapes against each other, head counts, lse, scale and strategy. Each sentence
names the argument, what was given and what is required. There is no fallback to another kernel:
what is not supported raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from dash.device import device_model, is_hopper
from dash.extension import extension

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128
HEAD_DIM_STEP = 8

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class UnsupportedError(ValueError):
    """The call cannot run. ``reasons`` lists every reason found, one sentence each."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("dash cannot run this: " + "; also: ".join(reasons))
        self.reasons = list(reasons)


def reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    softmax_lse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    strategy: str = "auto",
    group_split: int = 0,
) -> list[str]:
    """Why the backward of this attention cannot run; empty if it can.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, bfloat16 or float16.
        k, v: ``(batch, seqlen_k, kv_heads, head_dim)``, dtype of q.
        dout, out: like q, checked where given.
        softmax_lse: float32 ``(batch, heads, seqlen_q)`` or ``(batch, heads, seqlen_q, 1)``,
            checked where given.
        softmax_scale: finite, or None for ``head_dim ** -0.5``.
        causal: bottom-right aligned causal mask.
        strategy: a name of ``dash._C.strategies()`` or ``"auto"``.
        group_split: a divisor of heads / kv_heads, or 0.

    Returns:
        Sentences in the order of the checks. Later checks are left out where an earlier failure
        makes them meaningless.
    """
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: t for name, t in (("dout", dout), ("out", out)) if t is not None}
    with_lse = tensors if softmax_lse is None else tensors | {"softmax_lse": softmax_lse}

    found = [*_device_reasons(with_lse), *_dtype_reasons(tensors), *_layout_reasons(tensors)]
    if any(t.dim() != 4 for t in tensors.values()):
        return found
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    found += [*_shape_reasons(shapes), *_head_reasons(shapes)]
    if softmax_lse is not None:
        found += _lse_reasons(q, softmax_lse)
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        found.append(f"softmax_scale is {softmax_scale}; required: a finite number or None")
    if found:
        return found
    found += split_reasons(shapes["q"], shapes["k"], group_split)
    return found or list(_strategy_reasons(q, k, causal, strategy, group_split))


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> None:
    """Raises ``UnsupportedError`` with all that ``reasons`` finds for the same arguments."""
    found = reasons(q, k, v, **rest)  # type: ignore[arg-type]
    if found:
        raise UnsupportedError(found)


def strategy_reason(strategy: str, problem: object, resident_ctas: int) -> str | None:
    """Why ``strategy`` may not run a ``_C.Problem`` with so many resident CTAs; None if it may."""
    if strategy not in extension().strategies():
        return _unknown_strategy(strategy)
    return extension().why_not(strategy, problem, resident_ctas)


def make_problem(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], causal: bool, group_split: int = 1
) -> object:
    """The ``_C.Problem`` of ``(batch, seqlen, heads, head_dim)`` shapes, with the kernel's tiles.

    Raises:
        ValueError: a size is not positive or the head dimension has no kernel.
    """
    tile_q, tile_kv = extension().tile_shape(q_shape[3])
    return extension().Problem(
        batch=q_shape[0],
        heads=q_shape[2],
        kv_heads=kv_shape[2],
        seqlen_q=q_shape[1],
        seqlen_k=kv_shape[1],
        causal=causal,
        tile_q=tile_q,
        tile_kv=tile_kv,
        group_split=group_split,
    )


def split_reasons(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], group_split: int
) -> list[str]:
    """Why the q heads of a group cannot be cut into ``group_split`` parts; 0 is dash's choice."""
    if kv_shape[2] == 0:  # no keys, no groups
        return []
    group = q_shape[2] // kv_shape[2]
    if group_split == 0 or (group_split > 0 and group % group_split == 0):
        return []
    return [
        f"group_split is {group_split}; required: 0, or a divisor of heads / kv_heads, which is "
        f"{group}"
    ]


def shape_reasons(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """The dtype, shape and head count checks, for shapes without tensors (``dash.plan``)."""
    found = [] if dtype in DTYPES else [f"dtype is {dtype}; required: {_names(DTYPES)}"]
    for name, shape in (("q_shape", q_shape), ("kv_shape", kv_shape)):
        if len(shape) != 4 or min(shape) <= 0:
            found.append(
                f"{name} is {shape}; required: 4 positive sizes (batch, seqlen, heads, head_dim)"
            )
    if found:
        return found
    shapes = {"q": q_shape, "k": kv_shape}
    return [*_shape_reasons(shapes), *_head_reasons(shapes)]


def _device_reasons(tensors: Tensors) -> Iterator[str]:
    device = tensors["q"].device
    for name, t in tensors.items():
        if t.device != device:
            yield f"{name} is on {t.device}; required: {device}, the device of q"
    if device.type not in ("cuda", "cpu"):
        yield f"q is on {device}; required: a CUDA device of compute capability 9.0, or the CPU"
    elif device.type == "cuda" and not is_hopper(device.index):
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        yield (
            f"q is on {device}, a {name} of compute capability {major}.{minor}; required: "
            "compute capability 9.0 (H100, H800, H200, H20)"
        )
    elif device.type == "cuda" and not extension().HAS_KERNELS:
        yield (
            "q is on a CUDA device and this build of dash has no kernels; required: a build made "
            "with nvcc on PATH (python -m dash doctor)"
        )


def _dtype_reasons(tensors: Tensors) -> Iterator[str]:
    dtype = tensors["q"].dtype
    if dtype not in DTYPES:
        yield f"q has dtype {dtype}; required: {_names(DTYPES)}"
    for name, t in tensors.items():
        if t.dtype != dtype:
            yield f"{name} has dtype {t.dtype}; required: {dtype}, the dtype of q"


def _layout_reasons(tensors: Tensors) -> Iterator[str]:
    for name, t in tensors.items():
        if t.layout != torch.strided:
            yield f"{name} has layout {t.layout}; required: torch.strided"
        if t.dim() != 4:
            yield (
                f"{name} has {t.dim()} dimensions, shape {tuple(t.shape)}; required: 4, "
                "(batch, seqlen, heads, head_dim)"
            )


def _shape_reasons(shapes: Shapes) -> Iterator[str]:
    q, k = shapes["q"], shapes["k"]
    head_dim = q[3]
    if head_dim % HEAD_DIM_STEP != 0 or not 0 < head_dim <= MAX_HEAD_DIM:
        yield (
            f"q has head_dim {head_dim}; required: a multiple of {HEAD_DIM_STEP} from "
            f"{HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
        )
    if k[0] != q[0]:
        yield f"k has batch {k[0]}; required: {q[0]}, the batch of q"
    if k[3] != head_dim:
        yield f"k has head_dim {k[3]}; required: {head_dim}, the head_dim of q"
    for name, like in (("v", "k"), ("dout", "q"), ("out", "q")):
        if name in shapes and shapes[name] != shapes[like]:
            yield f"{name} has shape {shapes[name]}; required: {shapes[like]}, the shape of {like}"


def _head_reasons(shapes: Shapes) -> Iterator[str]:
    heads, kv_heads = shapes["q"][2], shapes["k"][2]
    if kv_heads == 0 or heads % kv_heads != 0:
        yield (
            f"q has {heads} heads and k has {kv_heads} kv_heads; required: heads a multiple of "
            "kv_heads"
        )


def _lse_reasons(q: torch.Tensor, lse: torch.Tensor) -> Iterator[str]:
    if lse.dtype != torch.float32:
        yield f"softmax_lse has dtype {lse.dtype}; required: torch.float32"
    if lse.layout != torch.strided:
        yield f"softmax_lse has layout {lse.layout}; required: torch.strided"
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) not in (wanted, (*wanted, 1)):
        yield (
            f"softmax_lse has shape {tuple(lse.shape)}; required: (batch, heads, seqlen_q) = "
            f"{wanted}, or {(*wanted, 1)}"
        )


def _strategy_reasons(
    q: torch.Tensor, k: torch.Tensor, causal: bool, strategy: str, group_split: int
) -> Iterator[str]:
    if strategy == "auto":
        return
    if q.numel() == 0 or k.numel() == 0:  # nothing to schedule: any known strategy will do
        if strategy not in extension().strategies():
            yield _unknown_strategy(strategy)
        return
    resident = device_model(q.device, q.dtype, q.shape[3]).resident_ctas
    problem = make_problem(tuple(q.shape), tuple(k.shape), causal, group_split or 1)
    reason = strategy_reason(strategy, problem, resident)
    if reason is not None:
        yield reason


def _unknown_strategy(strategy: str) -> str:
    known = ", ".join(repr(name) for name in ("auto", *extension().strategies()))
    return f"strategy is {strategy!r}; required: one of {known}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
