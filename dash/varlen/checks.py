"""What a packed call must look like: everything that can be seen without reading the device.

What ``cu_seqlens`` and ``seqused`` hold is not checked here: on a GPU that would wait for it.
``dash.varlen.sequences`` checks it where the CPU computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dash import support
from dash.extension import extension
from dash.support import UnsupportedError
from dash.varlen.call import PackedCall

Tensors = Mapping[str, torch.Tensor]

# Whether it may run depends on each sequence's lengths, which the host does not know.
_REFUSED_BY_NAME = "symmetric_shift"

_WINDOWS = ("window_left", "window_right")


def reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    softmax_lse: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **rest: object,
) -> list[str]:
    """Why the backward of this packed attention cannot run; empty if it can.

    Args:
        q: ``(total_q, heads, head_dim)``, bfloat16 or float16.
        k: ``(total_k, kv_heads, head_dim)``, dtype of q; v: the same with ``head_dim_v``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``.
        dout, out: like q but with ``head_dim_v``, checked where given.
        softmax_lse, dlse: float32 ``(heads, total_q)``, checked where given.
        seqused_q, seqused_k: int32 ``(batch,)``, checked where given.
        rest: ``softmax_scale``, ``causal``, ``strategy``, … as of ``dash.support.reasons``. A
            strategy given by name must accept the pack as one sequence, with the window and, as
            for a sequence that is too short for it, without.
    """
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    tensors = {name: t for name, t in given.items() if t is not None}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    lengths |= {name: t for name, t in given.items() if t is not None}
    given = {"softmax_lse": softmax_lse, "dlse": dlse}
    of_rows = {name: t for name, t in given.items() if t is not None}

    found = [
        *(
            f"{name} has {t.dim()} dimensions, shape {tuple(t.shape)}; required: 3, "
            "(total, heads, head_dim)"
            for name, t in tensors.items()
            if t.dim() != 3
        ),
        *(
            f"{name} is on {t.device}; required: {q.device}, the device of q"
            for name, t in (lengths | of_rows).items()
            if t.device != q.device
        ),
        *_length_reasons(lengths),
    ]
    if found:
        return found
    found = [*_shape_reasons(tensors)]
    for name, t in of_rows.items():
        found += _lse_reasons(q, name, t)
    if (reason := why_not_by_name(rest.get("strategy"))) is not None:
        found.append(reason)
    if found:
        return found
    # One sequence that fills the pack: the rest is said as of a dense call.
    dense = {name: t[None] for name, t in tensors.items()}
    found = support.reasons(**dense, **rest)
    if found or all(rest.get(name) is None for name in _WINDOWS):
        return found
    return support.reasons(**dense, **rest | dict.fromkeys(_WINDOWS))


def why_not_by_name(strategy: object) -> str | None:
    """Why a strategy cannot be asked for where sequences are packed; None if it can."""
    if strategy != _REFUSED_BY_NAME:
        return None
    return (
        f"strategy is {strategy!r}; required for packed sequences: another, because whether it may "
        "run depends on each length ('auto' takes it where it may)"
    )


def check(*tensors: torch.Tensor, **rest: object) -> None:
    """Raises ``UnsupportedError`` with all that ``reasons`` finds for the same arguments."""
    found = reasons(*tensors, **rest)  # type: ignore[arg-type]
    if found:
        raise UnsupportedError(found)


def _length_reasons(lengths: Tensors) -> Iterator[str]:
    batches = {}
    for name, t in lengths.items():
        if t.dtype != torch.int32:
            yield f"{name} has dtype {t.dtype}; required: torch.int32"
        entries = "batch + 1" if name.startswith("cu_") else "batch"
        if t.dim() != 1 or (t.shape[0] == 0 and name.startswith("cu_")):
            yield f"{name} has shape {tuple(t.shape)}; required: ({entries},)"
        else:
            batches[name] = t.shape[0] - name.startswith("cu_")
    batch = batches.get("cu_seqlens_q")
    for name, of_this in batches.items():
        if batch is not None and of_this != batch:
            yield (
                f"{name} has {lengths[name].shape[0]} entries, for {of_this} sequences; required: "
                f"for {batch}, as cu_seqlens_q has them"
            )


def _shape_reasons(tensors: Tensors) -> Iterator[str]:
    most = extension().MAX_TOTAL_ROWS
    for name in ("q", "k"):
        if tensors[name].shape[0] >= most:
            yield f"{name} has {tensors[name].shape[0]} rows; required: fewer than {most}"
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    of_v = shapes["v"][2]
    but = "" if of_v == shapes["q"][2] else " but with the head_dim of v"
    for name, like in (("v", "k"), ("dout", "q"), ("out", "q")):
        wanted = *shapes[like][:2], of_v
        if name in shapes and shapes[name] != wanted:
            yield f"{name} has shape {shapes[name]}; required: {wanted}, the shape of {like}{but}"


def _lse_reasons(q: torch.Tensor, name: str, lse: torch.Tensor) -> Iterator[str]:
    if lse.dtype != torch.float32:
        yield f"{name} has dtype {lse.dtype}; required: torch.float32"
    wanted = (q.shape[1], q.shape[0])
    if tuple(lse.shape) != wanted:
        yield (f"{name} has shape {tuple(lse.shape)}; required: (heads, total_q) = {wanted}")


def check_call(call: PackedCall) -> None:
    """Raises ``UnsupportedError`` with every reason why the backward cannot run."""
    support.check_tensors(**dict(zip(call._fields[:8], call[:8], strict=True)))
    arguments = call._asdict()
    del arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    check(**arguments)
