"""Any strides and base address give the bits of the contiguous call: CASES 7 and 8, on the CPU."""

from __future__ import annotations

import pytest
import torch
from op_calls import BFLOAT16, assert_same_bits, backward, call, randn

from dash.ops import tma_ready


def test_lse_is_taken_in_both_shapes_and_any_strides() -> None:
    tensors = call()
    wanted = backward(tensors)
    lse = tensors["softmax_lse"]
    strided = torch.full((*lse.shape[:2], 2 * lse.shape[2]), torch.nan)[..., ::2].copy_(lse)
    for same in (lse[..., None], strided, lse.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_same_bits(backward(tensors | {"softmax_lse": same}), wanted)


def test_scalar_dout_expanded() -> None:
    tensors = call()
    one = torch.ones((), dtype=BFLOAT16).expand(tensors["dout"].shape)
    assert_same_bits(
        backward(tensors | {"dout": one}), backward(tensors | {"dout": one.contiguous()})
    )


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
def test_views(name) -> None:
    tensors = call()
    wanted = backward(tensors)
    t = tensors[name]
    for view in (heads_first(t), sliced(t), misaligned(t), odd_rows(t), strided_head_dim(t)):
        assert torch.equal(view, t)
        assert_same_bits(backward(tensors | {name: view}), wanted)


def heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(t: torch.Tensor) -> torch.Tensor:
    full = torch.full((t.shape[0], t.shape[1] + 128, *t.shape[2:]), torch.nan, dtype=t.dtype)
    full[:, :-128] = t
    return full[:, :-128]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Base off by 2 bytes."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def odd_rows(t: torch.Tensor) -> torch.Tensor:
    """A sequence stride that is no multiple of 8 elements."""
    row = t.shape[2] * t.shape[3]
    store = torch.full((t.shape[0], t.shape[1], row + 3), torch.nan, dtype=t.dtype)
    return store[..., :row].unflatten(2, t.shape[2:]).copy_(t)


def strided_head_dim(t: torch.Tensor) -> torch.Tensor:
    store = torch.full((*t.shape[:3], 2 * t.shape[3]), torch.nan, dtype=t.dtype)
    return store[..., ::2].copy_(t)


def test_tma_ready_copies_only_what_tma_cannot_take() -> None:
    t = randn(2, 96, 4, 64)
    for fine in (t, heads_first(t), sliced(t), t[:1], t[:, :1], t[:, 8:, 1:]):
        assert tma_ready(fine) is fine
    expanded = randn(1, 96, 4, 64).expand(2, -1, -1, -1)
    for view in (misaligned(t), odd_rows(t), strided_head_dim(t), expanded, t[..., 4:12]):
        copy = tma_ready(view)
        assert copy is not view
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
