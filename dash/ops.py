"""``torch.ops.dash.attention_bwd``: the backward pass of attention as a PyTorch operator.

::

    attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
                  float? softmax_scale=None, bool causal=False, str strategy="auto",
                  int group_split=0, int? window_left=None, int? window_right=None,
                  Tensor? dlse=None)
        -> (Tensor dq, Tensor dk, Tensor dv)

``q`` is ``(batch, seqlen_q, heads, head_dim)`` and ``k`` ``(batch, seqlen_k, kv_heads, head_dim)``;
``v`` is like ``k`` and ``dout`` and ``out`` like ``q``, with ``head_dim_v``, which may be another;
all bfloat16 or all float16, any strides. ``softmax_lse`` is
float32 ``(batch, heads, seqlen_q)`` or ``(batch, heads, seqlen_q, 1)``: the natural log of the sum
of exp of the scaled scores; what it, ``out`` and ``dout`` hold for a row without keys is not read.
``softmax_scale`` defaults to ``head_dim ** -0.5``; ``causal`` is bottom-right aligned, and so are
the windows: a query sees ``window_left`` keys before its own place and ``window_right`` after it,
None meaning all. ``dlse``, float32 like ``softmax_lse``, is a gradient of it. ``strategy`` and
``group_split``, how many parts the q heads of a KV head are cut
into, fix the order of the sums (``dash.plan``). The outputs are new, contiguous, and bit for bit
the same on every call. ``dash.support`` raises for what is not supported, before anything is
launched. Autocast changes nothing here: inputs are taken in the dtypes they have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dash import reference, support
from dash.derivatives import define_batching, define_without_derivative
from dash.device import dtype_name
from dash.extension import extension
from dash.memory import contiguous_copy, uninitialized_like
from dash.plan import cached_plan
from dash.problem import Problem, head_dim_v
from dash.remembered import Remembered

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_TMA_ALIGNMENT_BYTES = 16
_TMA_STRIDE_ELEMENTS = 8  # 16 bytes of a 16-bit type

torch.library.define(
    "dash::attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    'float? softmax_scale=None, bool causal=False, str strategy="auto", int group_split=0, '
    "int? window_left=None, int? window_right=None, Tensor? dlse=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)


class Call(NamedTuple):
    """The operator's arguments, in the order of its schema."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    softmax_scale: float | None = None
    causal: bool = False
    strategy: str = "auto"
    group_split: int = 0
    window_left: int | None = None
    window_right: int | None = None
    dlse: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def problem(self) -> Problem:
        shapes = tuple(self.q.shape), tuple(self.k.shape)
        of_v = head_dim_v(self.q.shape, self.v.shape)
        return Problem(*shapes, self.q.dtype, *self.order, self.q.device, of_v)

    @property
    def order(self) -> tuple[object, ...]:
        """causal, strategy, group_split and the windows."""
        return self[7:12]

    @property
    def key(self) -> support.Key:
        """All that the checks look at but softmax_scale."""
        dlse = None if self.dlse is None else support.key_of((self.dlse,))
        return support.key_of(self[:6], (dlse, *self[7:12]))

    def check(self) -> None:
        """Raises ``UnsupportedError`` with every reason why the call cannot run."""
        support.check_tensors(**dict(zip(self._fields[:6], self[:6], strict=True)))
        tensors = {"dout": self.dout, "out": self.out, "softmax_lse": self.softmax_lse}
        tensors["dlse"] = self.dlse
        order = dict(zip(self._fields[7:12], self.order, strict=True))
        support.check(self.q, self.k, self.v, **tensors, softmax_scale=self.softmax_scale, **order)

    def zeros(self) -> Gradients:
        return tuple(t.new_zeros(t.shape) for t in (self.q, self.k, self.v))


@torch.library.register_fake("dash::attention_bwd")
def _attention_bwd_fake(*arguments: object) -> Gradients:
    call = Call(*arguments)
    return tuple(t.new_empty(t.shape) for t in (call.q, call.k, call.v))


def _attention_bwd_cpu(*arguments: object) -> Gradients:
    """Walks the same plan tile by tile in plain PyTorch (``dash.reference``)."""
    call = Call(*arguments)
    call.check()
    problem = call.problem()
    if problem.empty:
        return call.zeros()
    dlse = None if call.dlse is None else _rows(call.dlse)
    return reference.attention_bwd(
        *call[:5], _rows(call.softmax_lse), call.scale, cached_plan(problem), dlse
    )


class Launch(NamedTuple):
    """What does not change between calls with tensors of the same shapes: made once.

    Attributes:
        arguments: the first of ``_C.backward``: problem, strategy, dtype, head_dim.
        scale: where none is given.
        q_strides, k_strides: batch, seqlen and head strides of contiguous tensors.
        out_strides, v_strides: likewise, of head_dim_v.
        workspace_bytes: device memory that the kernels need for themselves.
        head_dim_v: None where it is head_dim.
    """

    arguments: tuple[object, str, str, int]
    scale: float
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    workspace_bytes: int
    head_dim_v: int | None


_launches: dict[tuple[object, ...], Launch | None] = Remembered(4096)


def _attention_bwd_cuda(*arguments: object) -> Gradients:
    """Enqueues the kernels on the current stream of the tensors' device, whichever is current."""
    call = Call(*arguments)
    launch = _launch_of(call)
    if launch is None:
        return call.zeros()
    dout, q, k, v, out, lse, scale, *_, dlse = call
    # Copies live to the end of the function, so that the launch reads memory that is theirs; later
    # allocations on this stream come after it.
    dout, of_dout = _ready(dout, launch.out_strides)
    q, of_q = _ready(q, launch.q_strides)
    k, of_k = _ready(k, launch.k_strides)
    v, of_v = _ready(v, launch.v_strides)
    out, of_out = _ready(out, launch.out_strides)
    dq, dk, dv = uninitialized_like(q), uninitialized_like(k), uninitialized_like(v)
    device = q.device
    workspace = torch.UntypedStorage(launch.workspace_bytes, device=device)
    try:
        extension().backward(
            *launch.arguments,
            launch.scale if scale is None else scale,
            of_q,
            of_k,
            of_v,
            of_out,
            of_dout,
            (lse.data_ptr(), *lse.stride()[:3]),
            (dq.data_ptr(), *launch.q_strides),
            (dk.data_ptr(), *launch.k_strides),
            (dv.data_ptr(), *launch.v_strides),
            workspace.data_ptr(),
            launch.workspace_bytes,
            device.index,
            torch._C._cuda_getCurrentRawStream(device.index),
            None,  # max_ctas
            None if dlse is None else (dlse.data_ptr(), *dlse.stride()[:3]),
            launch.head_dim_v,
        )
    except ValueError as error:  # what only the stream's context can say: too few SMs, for one
        raise support.UnsupportedError([str(error).removeprefix("dash: ")]) from error
    return dq, dk, dv


torch.library.impl("dash::attention_bwd", "cpu", _attention_bwd_cpu)
torch.library.impl("dash::attention_bwd", "cuda", _attention_bwd_cuda)


def _launch_of(call: Call) -> Launch | None:
    """The launch of a call, checked; None where there is nothing to compute.

    Raises:
        UnsupportedError: with every reason why the call cannot run.
    """
    key = call.key
    if key in _launches and support.scale_is_usable(call.softmax_scale):
        return _launches[key]
    call.check()
    _launches[key] = launch = _prepare(call)
    return launch


def _prepare(call: Call) -> Launch | None:
    problem = call.problem()
    if problem.empty:
        return None
    plan = cached_plan(problem)
    in_tiles = problem.in_tiles(plan.group_split)
    head_dim = call.q.shape[3]
    return Launch(
        (in_tiles, plan.strategy, dtype_name(call.q.dtype), head_dim),
        head_dim**-0.5,
        *(_contiguous_strides(t.shape) for t in (call.q, call.k, call.out, call.v)),
        plan.workspace_bytes,
        problem.head_dim_v,
    )


# As an autograd Function calls it.
attention_bwd = define_without_derivative("dash::attention_bwd", _attention_bwd_cuda)
define_batching("dash::attention_bwd", fold=True)


def tma_ready(t: torch.Tensor) -> torch.Tensor:
    """``t`` where TMA can read it as it lies, else a contiguous copy.

    TMA takes a last dimension without gaps, a 16-byte aligned base, and strides that are positive
    multiples of 16 bytes; expanded tensors (stride 0) are copied too.
    """
    if t.data_ptr() % _TMA_ALIGNMENT_BYTES:
        return contiguous_copy(t)
    if t.is_contiguous():
        return t
    strides_fit = all(
        size == 1 or (stride > 0 and stride % _TMA_STRIDE_ELEMENTS == 0)
        for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
    )
    return t if strides_fit and t.stride(3) == 1 else contiguous_copy(t)


def _ready(
    t: torch.Tensor, dense: tuple[int, int, int]
) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """``tma_ready`` and its address and strides; ``dense``: the strides of a contiguous tensor."""
    address = t.data_ptr()
    if address % _TMA_ALIGNMENT_BYTES == 0 and t.is_contiguous():  # nearly always, so first
        return t, (address, *dense)
    t = tma_ready(t)
    return t, _view(t, dense)


def _rows(lse: torch.Tensor) -> torch.Tensor:
    """``(batch, heads, seqlen_q)`` of what may have a last dimension of one."""
    return lse.reshape(lse.shape[:3])


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]


def _view(t: torch.Tensor, dense: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """(address, batch_stride, seq_stride, head_stride) in elements.

    The stride of a dimension of size 1 is never used and may hold anything, but a TMA descriptor
    checks it: it becomes that of ``dense``, the strides of a contiguous tensor.
    """
    if t.is_contiguous():
        return (t.data_ptr(), *dense)
    strides = (
        like if size == 1 else stride
        for size, stride, like in zip(t.shape[:3], t.stride()[:3], dense, strict=True)
    )
    return (t.data_ptr(), *strides)
