"""What forwards of others make of a v whose head dimension is not that of q and k."""

from __future__ import annotations

import torch

Kind = tuple[torch.dtype, int, int]


def kind_of_kernel(q: torch.Tensor, v: torch.Tensor) -> Kind:
    """dtype, head_dim and head_dim_v: what builds of FlashAttention-3 have kernels by."""
    return q.dtype, q.shape[-1], v.shape[-1]


def why_not_fa3(kind: Kind) -> str | None:
    """Why FlashAttention-3 has no kernel for these head dimensions; None if a build may have."""
    _, head_dim, of_v = kind
    wide = 128 < head_dim <= 192 and 96 < of_v <= 128
    if head_dim == of_v or wide or (head_dim <= 64 and of_v <= 512):
        return None
    return (
        f"{_dims(head_dim, of_v)}; required: equal ones, above 128 with above 96 to 128 of v, or "
        "up to 64 with up to 512"
    )


def why_not_cudnn(kind: Kind) -> str | None:
    """Why cuDNN is not asked; None if it may be."""
    _, head_dim, of_v = kind
    if head_dim == of_v or (head_dim, of_v) == (192, 128):
        return None
    return f"{_dims(head_dim, of_v)}; required: equal ones, or 192 with 128 of v"


def refused_by_fa3(kind: Kind, error: Exception) -> str:
    dtype, *dims = kind
    return f"flash_attn_interface refused {dtype}, {_dims(*dims)}: {error}"


def with_one_head_dim(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All with the larger head_dim, columns of zeros behind the smaller: they add 0 to each sum."""
    head_dim = max(q.shape[-1], v.shape[-1])
    return tuple(
        t if t.shape[-1] == head_dim else torch.nn.functional.pad(t, (0, head_dim - t.shape[-1]))
        for t in (q, k, v)
    )


def _dims(head_dim: int, of_v: int) -> str:
    return f"head_dim {head_dim}" if head_dim == of_v else f"head_dim {head_dim} with {of_v} of v"
