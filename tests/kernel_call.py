"""A direct call of ``_C.backward`` into tensors of the caller: for tests that own the outputs."""

from __future__ import annotations

import torch
from inputs import Gradients, Inputs, Shape, make_problem

from dash import _C


def view_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, batch, seq and head stride of a (batch, seqlen, heads, head_dim) tensor."""
    assert tensor.stride(3) == 1
    return tensor.data_ptr(), *tensor.stride()[:3]


def backward_into(
    grads: Gradients,
    shape: Shape,
    inputs: Inputs,
    strategy: str,
    max_ctas: int | None = None,
    group_split: int = 1,
) -> None:
    """Writes dq, dk, dv into ``grads`` on the current stream. Workspace: 0xFF bytes.

    ``max_ctas`` bounds the main kernel's grid; None leaves the binding to its default.
    """
    problem = make_problem(shape, group_split)
    size = _C.workspace_bytes(problem, *shape.head_dims)
    device = inputs.q.device
    workspace = torch.full((size + 1024,), 0xFF, dtype=torch.uint8, device=device)
    start = -workspace.data_ptr() % 1024
    names = ("dout", "q", "k", "v", "out")
    views = {name: view_of(getattr(inputs, name)) for name in names}
    views |= {name: view_of(t) for name, t in zip(("dq", "dk", "dv"), grads, strict=True)}
    _C.backward(
        problem=problem,
        strategy=strategy,
        dtype="bfloat16" if shape.dtype == torch.bfloat16 else "float16",
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        softmax_scale=shape.softmax_scale,
        lse=(inputs.lse.data_ptr(), *inputs.lse.stride()),
        workspace=workspace.data_ptr() + start,
        workspace_bytes=size,
        device=device.index if device.index is not None else torch.cuda.current_device(),
        stream=torch.cuda.current_stream(device).cuda_stream,
        **({} if max_ctas is None else {"max_ctas": max_ctas}),
        **views,
    )
