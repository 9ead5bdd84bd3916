"""Forward passes that ``dash.attention`` may call; none of them is ours but the last.

"auto" takes the first of these that can run the call:

- ``"fa3"``: the package of FlashAttention-3 (``flash_attn_interface``);
- ``"cudnn"``: the cuDNN kernel behind PyTorch's SDPA. It knows no windows, and its causal mask is
  aligned top-left, so for a causal mask only where seqlen_q = seqlen_k;
- ``"flash"``: the FlashAttention-2 kernel behind SDPA. Called as an operator its causal mask is
  aligned bottom-right, as dash defines it (torch/nn/attention/bias.py relies on the same);
  ``scaled_dot_product_attention(is_causal=True)`` is not: it refuses or realigns unequal lengths.
  It knows one head dimension, so where that of v differs, the smaller is padded with zeros;
- ``"plain"``: PyTorch operations in fp32, for the CPU and for what the others refuse.

The first three look for a row's largest score before they scale it, which is its largest scaled
score only for a positive scale: others are plain's.

All return ``out`` ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype and ``lse`` ``(batch,
heads, seqlen_q)`` fp32, the natural log of the sum of exp of the scaled scores, ±inf for rows
without keys. Rows without keys have zeros in ``out``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from dash.head_dims import (
    Kind,
    kind_of_kernel,
    refused_by_fa3,
    why_not_cudnn,
    why_not_fa3,
    with_one_head_dim,
)
from dash.mask import Mask
from dash.memory import contiguous
from dash.plain import plain_forward
from dash.problem import Problem
from dash.support import BUCKETS, DTYPES, UnsupportedError

Result = tuple[torch.Tensor, torch.Tensor]

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below, kernels flush it to zero


class ForwardCall(NamedTuple):
    """One attention forward: shapes as in ``dash.attention``, the scale as it is used."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None

    @property
    def mask(self) -> Mask:
        windows = self.window_left, self.window_right
        return Mask.of(self.q.shape[1], self.k.shape[1], self.causal, *windows)

    @property
    def windowed(self) -> bool:
        return self.window_left is not None or self.window_right is not None


def run_forward(call: ForwardCall, forward: str = "auto") -> Result:
    """out and lse by the forward of that name, or by the first that can.

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this call.
    """
    # Kernels take no gaps in the last dimension.
    dense = (t if t.stride(3) == 1 else contiguous(t) for t in call[:3])
    call = ForwardCall(*dense, *call[3:])
    name = choose_forward(call, forward)
    if name != "fa3":
        return _FORWARDS[name](call)
    try:
        return fa3_forward(call)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if is_of_the_device(error):
            raise
        _note_fa3_failure(call, error)
    return run_forward(call, forward)


def choose_forward(call: ForwardCall, forward: str = "auto") -> str:
    """The name of the first forward that can run the call, or of the one asked for.

    Which kernel PyTorch may use follows its own switches (``torch.nn.attention.sdpa_kernel``).

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this call.
    """
    if forward == "auto":
        return next(name for name, refusal in _REFUSALS.items() if refusal(call) is None)
    if forward not in _REFUSALS:
        known = ", ".join(map(repr, ("auto", *_REFUSALS)))
        raise UnsupportedError([f"forward is {forward!r}; required: one of {known}"])
    reason = _REFUSALS[forward](call)
    if reason is not None:
        raise UnsupportedError([f"forward is {forward!r}, and {reason}"])
    return forward


def planned_forward(problem: Problem, forward: str = "auto") -> str:
    """The name of the forward that ``dash.attention`` takes for a problem, without running it.

    For contiguous inputs, the scale that is the default, and PyTorch's switches as they are now.

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this problem.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not for the operator

    with FakeTensorMode():
        shapes = problem.q_shape, problem.kv_shape, problem.v_shape
        q, k, v = (torch.empty(s, dtype=problem.dtype, device=problem.device) for s in shapes)
        windows = problem.window_left, problem.window_right
        return choose_forward(ForwardCall(q, k, v, 1.0, problem.causal, *windows), forward)


# What is known of each: whether a call repeats its bits, and whether a sequence's depend on others.
KNOWN = {
    "fa3": "not split over keys as called here; bits across batch sizes are not promised",
    "cudnn": "cuDNN chooses its kernel by shape, so bits may depend on the batch and the release",
    "flash": "dense calls are split over keys where SMs would idle, so bits may depend on the "
    "batch and the device; packed calls are not",
    "plain": "matrix products of PyTorch, whose bits may depend on the batch and the machine",
}

# ---- FlashAttention-3's package ------------------------------------------------------------------


def fa3_package() -> ModuleType | None:
    """``flash_attn_interface`` where it is installed and loads, else None."""
    return _find_fa3()[0]


def why_no_fa3() -> str:
    """Why ``fa3_package`` is None."""
    return _find_fa3()[1]


@functools.lru_cache(maxsize=1)
def _find_fa3() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("flash_attn_interface")
        _ = module.flash_attn_func
    except ModuleNotFoundError as error:
        if error.name == "flash_attn_interface":
            return None, "flash_attn_interface is not installed"
        return None, f"flash_attn_interface does not load: {error!r}"
    except Exception as error:  # whatever it does on import: another torch, no driver, its own bugs
        return None, f"flash_attn_interface does not load: {error!r}"
    return module, ""


# What this build of the package was seen to lack, and what it said.
_fa3_lacks: dict[Kind, str] = {}


def fa3_forward(call: ForwardCall) -> Result:
    function = fa3_package().flash_attn_func
    more = {}
    if takes_return_attn_probs(function):
        more["return_attn_probs"] = True
    if call.windowed:
        more["window_size"] = _window_sizes(call)
    out, lse, *_ = function(
        call.q, call.k, call.v, softmax_scale=call.scale, causal=call.causal, **more
    )
    return contiguous(out), contiguous(lse)


def fa3_gaps(device: torch.device) -> list[str]:
    """What the package's build lacks of dash's dtypes and head dimensions, by small calls."""
    for dtype, (qk, of_v) in itertools.product(DTYPES, BUCKETS):
        q, v = (torch.zeros(1, 1, 1, n, dtype=dtype, device=device) for n in (qk, of_v))
        call = ForwardCall(q, q, v, 1.0)
        try:
            fa3_forward(call)
        except Exception as error:  # a report, not a call: whatever it is, it is what it says
            kind = kind_of_kernel(q, v)
            _fa3_lacks[kind] = refused_by_fa3(kind, error)
    return list(_fa3_lacks.values())


@functools.lru_cache(maxsize=1)
def takes_return_attn_probs(function: Callable[..., object]) -> bool:
    """Releases up to spring 2025 always return lse; later ones only when asked."""
    return "return_attn_probs" in inspect.signature(function).parameters


def _fa3_refusal(call: ForwardCall) -> str | None:
    if call.q.device.type != "cuda":
        return f"q is on {call.q.device}; required: a CUDA device"
    if fa3_package() is None:
        return why_no_fa3()
    if call.scale < SMALLEST_SCALE:
        return needs_positive_scale(call.scale)
    kind = kind_of_kernel(call.q, call.v)
    return why_not_fa3(kind) or _fa3_lacks.get(kind)


def _note_fa3_failure(call: ForwardCall, error: Exception) -> None:
    kind = kind_of_kernel(call.q, call.v)
    _fa3_lacks[kind] = said = refused_by_fa3(kind, error)
    warnings.warn(
        f"dash.attention: {said}; another forward is taken",
        RuntimeWarning,
        stacklevel=3,
    )


def is_of_the_device(error: Exception) -> bool:
    """Whether the device failed, and not the package: then no other forward would help."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error)


# ---- PyTorch's kernels ---------------------------------------------------------------------------


def cudnn_forward(call: ForwardCall) -> Result:
    if call.windowed or (call.causal and call.q.shape[1] != call.k.shape[1]):
        raise ValueError("cuDNN's causal mask is aligned top-left: wrong unless lengths are equal")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(t.transpose(1, 2) for t in call[:3]),
        None,
        True,
        0.0,
        call.causal,
        False,
        scale=call.scale,
    )
    return contiguous(out.transpose(1, 2)), contiguous(lse.reshape(lse.shape[:3]))


def _cudnn_refusal(call: ForwardCall) -> str | None:
    if call.q.device.type != "cuda":
        return f"q is on {call.q.device}; required: a CUDA device"
    if call.windowed:
        return "a window is given; required: none"
    if call.causal and call.q.shape[1] != call.k.shape[1]:
        return (
            f"seqlen_q is {call.q.shape[1]} and seqlen_k {call.k.shape[1]}; required: equal "
            "lengths for a causal mask"
        )
    if call.scale < SMALLEST_SCALE:
        return needs_positive_scale(call.scale)
    if (reason := why_not_cudnn(kind_of_kernel(call.q, call.v))) is not None:
        return reason
    if not torch.backends.cuda.can_use_cudnn_attention(_sdpa_params(call, call.causal)):
        return "PyTorch's cuDNN attention cannot run it, or is switched off"
    return None


def flash_forward(call: ForwardCall) -> Result:
    left, right = _window_sizes(call)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *with_one_head_dim(*call[:3]),
        None,
        None,
        call.q.shape[1],
        call.k.shape[1],
        0.0,
        call.causal,
        False,
        scale=call.scale,
        window_size_left=left,
        window_size_right=0 if call.causal else right,
    )
    return contiguous(out[..., : call.v.shape[3]]), contiguous(lse)


def _flash_refusal(call: ForwardCall) -> str | None:
    if call.q.device.type != "cuda":
        return f"q is on {call.q.device}; required: a CUDA device"
    if call.scale < SMALLEST_SCALE:
        return needs_positive_scale(call.scale)
    # SDPA's own check refuses a causal mask for unequal lengths, which the operator can do.
    square = call.q.shape[1] == call.k.shape[1]
    if call.q.shape[3] != call.v.shape[3]:  # what it will see, of one row
        call = call._replace(
            **dict(zip("qkv", with_one_head_dim(*(t[:, :1] for t in call[:3])), strict=True))
        )
    if not torch.backends.cuda.can_use_flash_attention(_sdpa_params(call, call.causal and square)):
        return "PyTorch's flash attention cannot run it, or is switched off"
    return None


def needs_positive_scale(scale: float) -> str:
    return f"softmax_scale is {scale}; required: a positive number, or forward 'plain'"


def _window_sizes(call: ForwardCall) -> tuple[int, int]:
    """(left, right) as FlashAttention counts: -1 for unlimited."""
    sizes = (call.window_left, call.window_right)
    return tuple(-1 if size is None else min(size, 2**31 - 1) for size in sizes)


def _sdpa_params(call: ForwardCall, causal: bool) -> torch.backends.cuda.SDPAParams:
    query, key, value = (t.transpose(1, 2) for t in call[:3])
    grouped = call.q.shape[2] != call.k.shape[2]
    return torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)


_FORWARDS: dict[str, Callable[[ForwardCall], Result]] = {
    "fa3": fa3_forward,
    "cudnn": cudnn_forward,
    "flash": flash_forward,
    "plain": lambda call: plain_forward(*call),
}
_REFUSALS: dict[str, Callable[[ForwardCall], str | None]] = {
    "fa3": _fa3_refusal,
    "cudnn": _cudnn_refusal,
    "flash": _flash_refusal,
    "plain": lambda call: None,
}
