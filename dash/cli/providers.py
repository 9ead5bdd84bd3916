"""Backward passes that this machine can run, ready to be timed side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from dash.cli.problem import Inputs

Gradients = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Provider:
    """A backward pass of one problem.

    Attributes:
        name: for people.
        deterministic: whether it promises the same bits on every call.
        backward: computes the gradients; nothing but the backward pass.
    """

    name: str
    deterministic: bool
    backward: Callable[[], Gradients]


def providers(inputs: Inputs, strategies: list[str]) -> Iterator[Provider]:
    """dash with each strategy, then what PyTorch has for the same problem."""
    for strategy in strategies:
        yield Provider(f"dash {strategy}", True, lambda s=strategy: inputs.backward(s))
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    square = q.shape[2] == k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    # The operator aligns its causal mask bottom-right; SDPA's check only knows square ones.
    if can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, inputs.causal and square, grouped)):
        yield Provider("FA2 deterministic", True, _flash(inputs))
    aligned = square or not inputs.causal
    if aligned and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, inputs.causal, grouped)):
        yield Provider("cuDNN", False, _cudnn(inputs))


def _flash(inputs: Inputs) -> Callable[[], Gradients]:
    """PyTorch's FlashAttention-2, told to be deterministic."""
    q, k, v = _leaves(inputs)
    scale = inputs.q.shape[3] ** -0.5
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, inputs.causal, False, scale=scale
    )[0]
    backward = _autograd(out, (q, k, v), inputs)

    def deterministic() -> Gradients:
        with deterministic_algorithms():
            return backward()

    return deterministic


def _cudnn(inputs: Inputs) -> Callable[[], Gradients]:
    q, k, v = _leaves(inputs)
    scale = inputs.q.shape[3] ** -0.5
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, inputs.causal, False, scale=scale
    )[0]
    return _autograd(out, (q, k, v), inputs)


def _leaves(inputs: Inputs) -> list[torch.Tensor]:
    """q, k, v as SDPA wants them, ``(batch, heads, seqlen, head_dim)``, in dash's memory layout."""
    tensors = (inputs.q, inputs.k, inputs.v)
    return [t.transpose(1, 2).detach().requires_grad_() for t in tensors]


def _autograd(
    out: torch.Tensor, leaves: tuple[torch.Tensor, ...], inputs: Inputs
) -> Callable[[], Gradients]:
    dout = inputs.dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """What FlashAttention-2 in PyTorch asks for its order; without PyTorch's fill of new memory."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
