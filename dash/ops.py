"""``torch.ops.dash.attention_bwd``: the backward pass of attention as a PyTorch operator.

    attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
                  float? softmax_scale=None, bool causal=False, str strategy="auto",
                  int group_split=0)
        -> (Tensor dq, Tensor dk, Tensor dv)

``dout``, ``q``, ``out`` are ``(batch, seqlen_q, heads, head_dim)``; ``k``, ``v`` are ``(batch,
seqlen_k, kv_heads, head_dim)``; all bfloat16 or all float16, any strides. ``softmax_lse`` is
float32 ``(batch, heads, seqlen_q)`` or ``(batch, heads, seqlen_q, 1)``: the natural log of the sum
of exp of the scaled scores, ±inf for a row without keys. ``softmax_scale`` defaults to
``head_dim ** -0.5``; ``causal`` is bottom-right aligned. ``strategy`` and ``group_split``, how many
parts the q heads of a KV head are cut into, fix the order of the sums (``dash.plan``). The outputs
are new, contiguous, and bit for bit the same on every call. ``dash.support`` raises for what is not
supported, before anything is launched.
"""

from __future__ import annotations

import torch

from dash import reference, support
from dash.device import dtype_name
from dash.extension import extension
from dash.plan import Plan, cached_plan

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_TMA_ALIGNMENT_BYTES = 16
_TMA_STRIDE_ELEMENTS = 8  # 16 bytes of a 16-bit type

torch.library.define(
    "dash::attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    'float? softmax_scale=None, bool causal=False, str strategy="auto", int group_split=0) '
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.register_fake("dash::attention_bwd")
def _attention_bwd_fake(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    strategy: str = "auto",
    group_split: int = 0,
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_bwd_cpu(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    strategy: str = "auto",
    group_split: int = 0,
) -> Gradients:
    """Walks the same plan tile by tile in plain PyTorch (``dash.reference``)."""
    plan = _checked_plan(
        dout, q, k, v, out, softmax_lse, softmax_scale, causal, strategy, group_split
    )
    if plan is None:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    lse = softmax_lse.reshape(softmax_lse.shape[:3])
    scale = _scale(q, softmax_scale)
    return reference.attention_bwd(dout, q, k, v, out, lse, softmax_scale=scale, plan=plan)


def _attention_bwd_cuda(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    strategy: str = "auto",
    group_split: int = 0,
) -> Gradients:
    """Enqueues the kernels on the current stream of the tensors' device, whichever is current."""
    plan = _checked_plan(
        dout, q, k, v, out, softmax_lse, softmax_scale, causal, strategy, group_split
    )
    if plan is None:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    with torch.cuda.device(q.device):
        # Copies live to the end of the function, so that the launch reads memory that is theirs;
        # later allocations on this stream come after it.
        dout, q, k, v, out = (tma_ready(t) for t in (dout, q, k, v, out))
        # A bare storage: torch.use_deterministic_algorithms fills torch.empty with NaN, which would
        # cost a write of every fp32 dQ sum.
        workspace = torch.UntypedStorage(plan.workspace_bytes, device=q.device)
        extension().backward(
            problem=support.make_problem(plan.q_shape, plan.kv_shape, causal, plan.group_split),
            strategy=plan.strategy,
            dtype=dtype_name(q.dtype),
            head_dim=q.shape[3],
            softmax_scale=_scale(q, softmax_scale),
            q=_view(q),
            k=_view(k),
            v=_view(v),
            out=_view(out),
            dout=_view(dout),
            lse=(softmax_lse.data_ptr(), *softmax_lse.stride()[:3]),
            dq=_view(dq),
            dk=_view(dk),
            dv=_view(dv),
            workspace=workspace.data_ptr(),
            workspace_bytes=plan.workspace_bytes,
            device=q.device.index,
            stream=torch.cuda.current_stream(q.device).cuda_stream,
        )
    return dq, dk, dv


torch.library.impl("dash::attention_bwd", "cpu", _attention_bwd_cpu)
torch.library.impl("dash::attention_bwd", "cuda", _attention_bwd_cuda)


def _no_second_derivative(ctx: object, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "dash::attention_bwd has no derivative: a gradient of attention's gradient was asked for "
        "(double backward, create_graph=True). Use torch.nn.functional."
        "scaled_dot_product_attention with the math backend where second derivatives are needed."
    )


torch.library.register_autograd("dash::attention_bwd", _no_second_derivative)


def tma_ready(t: torch.Tensor) -> torch.Tensor:
    """``t`` where TMA can read it as it lies, else a contiguous copy.

    TMA takes a last dimension without gaps, a 16-byte aligned base, and strides that are positive
    multiples of 16 bytes; expanded tensors (stride 0) are copied too.
    """
    strides_fit = all(
        size == 1 or (stride > 0 and stride % _TMA_STRIDE_ELEMENTS == 0)
        for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
    )
    if strides_fit and t.stride(3) == 1 and t.data_ptr() % _TMA_ALIGNMENT_BYTES == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _checked_plan(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    strategy: str,
    group_split: int,
) -> Plan | None:
    """The plan of a supported call; None where there is nothing to compute.

    Raises:
        UnsupportedError: with every reason why the call cannot run.
    """
    support.check(
        q, k, v, dout=dout, out=out, softmax_lse=softmax_lse, softmax_scale=softmax_scale,
        causal=causal, strategy=strategy, group_split=group_split,
    )  # fmt: skip
    if q.numel() == 0 or k.numel() == 0:
        return None
    shapes = tuple(q.shape), tuple(k.shape)
    return cached_plan(*shapes, q.dtype, causal, strategy, group_split, q.device)


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale


def _view(t: torch.Tensor) -> tuple[int, int, int, int]:
    """(address, batch_stride, seq_stride, head_stride) in elements.

    The stride of a dimension of size 1 is never used and may hold anything, but a TMA descriptor
    checks it: it becomes the stride of a contiguous tensor.
    """
    dense = (t.shape[1] * t.shape[2] * t.shape[3], t.shape[2] * t.shape[3], t.shape[3])
    strides = (
        like if size == 1 else stride
        for size, stride, like in zip(t.shape[:3], t.stride()[:3], dense, strict=True)
    )
    return (t.data_ptr(), *strides)
