"""What dash can run, and a sentence for each thing that it cannot.

Everything is checked before anything is launched, in this order: device and architecture, dtype,
rank and layout, shapes against each other, head counts, lse, scale and strategy. Each sentence
names the argument, what was given and what is required. There is no fallback to another kernel:
what is not supported raises.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping

import torch

from dash.device import device_model, is_hopper
from dash.extension import extension
from dash.problem import Problem, head_dim_v, make_problem

__all__ = ["UnsupportedError", "check", "key_of", "make_problem", "problem_reasons", "reasons"]

DTYPES = (torch.bfloat16, torch.float16)
BUCKETS = ((64, 64), (128, 128), (192, 128))  # head_dim of q and k, and of v
MAX_HEAD_DIM, MAX_HEAD_DIM_V = BUCKETS[-1]
HEAD_DIM_STEP = 8

# The kernels hold softmax_scale times log2 e in fp32.
MAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class UnsupportedError(ValueError):
    """The call cannot run. ``reasons`` lists every reason found, one sentence each."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("dash cannot run this: " + "; also: ".join(reasons))
        self.reasons = list(reasons)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reasons,)


def reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    softmax_lse: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    **order: object,
) -> list[str]:
    """Why the backward of this attention cannot run; empty if it can.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, bfloat16 or float16.
        k: ``(batch, seqlen_k, kv_heads, head_dim)``, dtype of q.
        v: ``(batch, seqlen_k, kv_heads, head_dim_v)``, likewise.
        dout, out: like q but with ``head_dim_v``, checked where given.
        softmax_lse: float32 ``(batch, heads, seqlen_q)`` or ``(batch, heads, seqlen_q, 1)``,
            checked where given.
        dlse: like softmax_lse, checked where given.
        softmax_scale: finite, or None for ``head_dim ** -0.5``.
        order: ``causal``, ``strategy``, ``group_split``, ``window_left`` and ``window_right`` as in
            ``dash.problem.Problem``.

    Returns:
        Sentences in the order of the checks. Later checks are left out where an earlier failure
        makes them meaningless.
    """
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: t for name, t in (("dout", dout), ("out", out)) if t is not None}
    lse = {name: t for name, t in (("softmax_lse", softmax_lse), ("dlse", dlse)) if t is not None}
    with_lse = tensors | lse
    if no_tensors := _no_tensors(with_lse):
        return no_tensors
    found = [*_device_reasons(with_lse), *_dtype_reasons(tensors), *_layout_reasons(tensors)]
    if any(t.dim() != 4 for t in tensors.values()):
        return found
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    found += [*_shape_reasons(shapes), *_head_reasons(shapes)]
    for name, t in lse.items():
        found += _lse_reasons(q, name, t)
    found += scale_reasons(softmax_scale)
    if found:
        return found
    v = head_dim_v(q.shape, v.shape)
    problem = Problem(shapes["q"], shapes["k"], q.dtype, device=q.device, head_dim_v=v, **order)
    return order_reasons(problem)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> None:
    """Raises ``UnsupportedError`` with all that ``reasons`` finds for the same arguments."""
    found = reasons(q, k, v, **rest)  # type: ignore[arg-type]
    if found:
        raise UnsupportedError(found)


Key = tuple[object, ...]


def key_of(tensors: tuple[torch.Tensor, ...], rest: tuple[object, ...] = ()) -> Key:
    """All that the checks look at but softmax_scale: calls with equal keys fare alike."""
    key = list(rest)
    for t in tensors:  # None, which PyTorch takes for a tensor, until the checks say so
        key += (None,) if t is None else (t.shape, t.dtype, t.device)
    return tuple(key)


def scale_is_usable(softmax_scale: float | None) -> bool:
    return softmax_scale is None or -MAX_SCALE <= softmax_scale <= MAX_SCALE  # False for NaN


def check_once(call: object, checked: dict[Key, bool]) -> None:
    """``call.check()``, unless ``checked`` has the key of a call that passed."""
    key = call.key
    if key not in checked or not scale_is_usable(call.softmax_scale):
        call.check()
        checked[key] = True


def check_tensors(**tensors: object) -> None:
    """Raises ``UnsupportedError`` for what is no tensor: PyTorch takes None for one."""
    for value in tensors.values():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(_no_tensors(tensors))


def _no_tensors(tensors: Mapping[str, object]) -> list[str]:
    return [
        f"{name} is {repr(value)[:40]}, a {type(value).__name__}; required: a torch.Tensor"
        for name, value in tensors.items()
        if not isinstance(value, torch.Tensor)
    ]


def problem_reasons(problem: Problem) -> list[str]:
    """Why a problem cannot run, for shapes without tensors (``dash.plan``); empty if it can."""
    found = [] if problem.dtype in DTYPES else [_dtype_reason("dtype", problem.dtype)]
    for name, shape in (("q_shape", problem.q_shape), ("kv_shape", problem.kv_shape)):
        positive = all(isinstance(n, numbers.Integral) and n > 0 for n in shape)
        if len(shape) != 4 or not positive:
            found.append(
                f"{name} is {shape}; required: 4 positive sizes (batch, seqlen, heads, head_dim)"
            )
    if found:
        return found
    shapes = {"q": problem.q_shape, "k": problem.kv_shape}
    if problem.head_dim_v is not None:
        shapes["v"] = *problem.kv_shape[:3], problem.head_dim_v
    return [*_shape_reasons(shapes), *_head_reasons(shapes)] or order_reasons(problem)


def order_reasons(problem: Problem) -> list[str]:
    """The checks of mask, sizes, parts and strategy, for shapes that fit each other."""
    found = [*_window_reasons(problem), *_split_reasons(problem)]
    if found:
        return found
    return list(_strategy_reasons(problem))


def scale_reasons(softmax_scale: float | None) -> Iterator[str]:
    """Why a softmax_scale cannot be used."""
    if softmax_scale is None:
        return
    if not isinstance(softmax_scale, numbers.Real):
        yield (
            f"softmax_scale is a {type(softmax_scale).__name__}; required: a number, which takes "
            "no gradient, or None"
        )
    elif softmax_scale in (math.inf, -math.inf) or softmax_scale != softmax_scale:
        yield f"softmax_scale is {softmax_scale}; required: a finite number or None"
    elif abs(softmax_scale) > MAX_SCALE:
        yield (
            f"softmax_scale is {str(softmax_scale)[:40]}; required: at most {MAX_SCALE:.3g} in "
            "magnitude, because the kernels hold it times log2 e in float32"
        )


def strategy_reason(strategy: str, problem: object, resident_ctas: int) -> str | None:
    """Why ``strategy`` may not run a ``_C.Problem`` with so many resident CTAs; None if it may."""
    if strategy not in extension().strategies():
        return _unknown_strategy(strategy)
    return extension().why_not(strategy, problem, resident_ctas)


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
        yield _dtype_reason("q", dtype)
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
    head_dim, of_v = q[3], shapes.get("v", k)[3]
    yield from _head_dim_reasons("q", "head_dim", head_dim, MAX_HEAD_DIM)
    yield from _head_dim_reasons("v", "head_dim_v", of_v, MAX_HEAD_DIM_V)
    if k[0] != q[0]:
        yield f"k has batch {k[0]}; required: {q[0]}, the batch of q"
    if k[3] != head_dim:
        yield f"k has head_dim {k[3]}; required: {head_dim}, the head_dim of q"
    for name, like in (("v", "k"), ("dout", "q"), ("out", "q")):
        wanted = *shapes[like][:3], of_v
        if name in shapes and shapes[name] != wanted:
            but = "" if of_v == head_dim else " but with the head_dim of v"
            yield f"{name} has shape {shapes[name]}; required: {wanted}, the shape of {like}{but}"


def _head_dim_reasons(tensor: str, name: str, given: int, most: int) -> Iterator[str]:
    if not isinstance(given, numbers.Integral) or not 0 < given <= most or given % HEAD_DIM_STEP:
        yield (
            f"{tensor} has {name} {given}; required: a multiple of {HEAD_DIM_STEP} from "
            f"{HEAD_DIM_STEP} to {most}"
        )


def _head_reasons(shapes: Shapes) -> Iterator[str]:
    heads, kv_heads = shapes["q"][2], shapes["k"][2]
    if kv_heads == 0 or heads % kv_heads != 0:
        yield (
            f"q has {heads} heads and k has {kv_heads} kv_heads; required: heads a multiple of "
            "kv_heads"
        )


def _lse_reasons(q: torch.Tensor, name: str, lse: torch.Tensor) -> Iterator[str]:
    if lse.dtype != torch.float32:
        yield f"{name} has dtype {lse.dtype}; required: torch.float32"
    if lse.layout != torch.strided:
        yield f"{name} has layout {lse.layout}; required: torch.strided"
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) not in (wanted, (*wanted, 1)):
        yield (
            f"{name} has shape {tuple(lse.shape)}; required: (batch, heads, seqlen_q) = "
            f"{wanted}, or {(*wanted, 1)}"
        )


def _window_reasons(problem: Problem) -> Iterator[str]:
    windows = {"window_left": problem.window_left, "window_right": problem.window_right}
    for name, keys in windows.items():
        if keys is None:
            continue
        if not isinstance(keys, numbers.Integral) or isinstance(keys, bool) or keys < 0:
            yield f"{name} is {keys!r}; required: None, or keys as an integer from 0 on"


def _split_reasons(problem: Problem) -> Iterator[str]:
    """Why the q heads of a group cannot be cut into ``group_split`` parts; 0 is dash's choice."""
    kv_heads = problem.kv_shape[2]
    if kv_heads == 0:  # no keys, no groups
        return
    group, split = problem.q_shape[2] // kv_heads, problem.group_split
    if not isinstance(split, numbers.Integral) or split < 0 or (split > 0 and group % split != 0):
        yield (
            f"group_split is {split!r}; required: 0, or a divisor of heads / kv_heads, which is "
            f"{group}"
        )


def _strategy_reasons(problem: Problem) -> Iterator[str]:
    strategy = problem.strategy
    if strategy != "auto" and strategy not in extension().strategies():
        yield _unknown_strategy(strategy)
        return
    if problem.empty:  # nothing to schedule: any known strategy will do
        return
    try:
        in_tiles = problem.in_tiles()
    except ValueError as error:  # sizes beyond what a schedule counts
        yield str(error)
        return
    if strategy == "auto":
        return
    resident = device_model(problem.device, problem.dtype, *problem.head_dims).resident_ctas
    reason = strategy_reason(strategy, in_tiles, resident)
    if reason is not None:
        yield reason


def _dtype_reason(name: str, dtype: torch.dtype) -> str:
    is_or_has = "is" if name == "dtype" else "has dtype"
    return f"{name} {is_or_has} {dtype}; required: {_names(DTYPES)}"


def _unknown_strategy(strategy: str) -> str:
    known = ", ".join(repr(name) for name in ("auto", *extension().strategies()))
    return f"strategy is {strategy!r}; required: one of {known}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
