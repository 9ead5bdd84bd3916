"""How exact gradients are: an fp64 reference, plain PyTorch beside it, and the rule.

Per tensor: max|x - ref| ≤ 2·max|pt - ref| + 2·max|((ref + 0.3) - 0.3) - ref|, where ``pt`` is plain
PyTorch in the inputs' dtype and the last term is taken in that dtype too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dash.cli.problem import Inputs

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Verdict:
    """One gradient against the rule; errors are largest absolute ones.

    Attributes:
        name: dq, dk or dv.
        error: of the gradient under test.
        plain_error: of plain PyTorch in the same dtype.
        allowed: what the rule allows.
    """

    name: str
    error: float
    plain_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def judge(inputs: Inputs, grads: Gradients) -> list[Verdict]:
    """The verdicts on dq, dk, dv; the reference is made a (batch, kv head) pair at a time."""
    error, plain_error, slack = torch.zeros(3, 3, dtype=torch.float64)
    rows, columns = (torch.arange(t.shape[1], device=t.device) for t in (inputs.q, inputs.k))
    hidden = ~inputs.forward_call().mask.sees(rows, columns)
    for pair in _pairs(inputs, grads):
        q, k, v, dout, *got = pair
        exact = _autograd(q.double(), k.double(), v.double(), dout.double(), hidden)
        plain = _autograd(q, k, v, dout, hidden)
        for i, (x, ref, pt) in enumerate(zip(got, exact, plain, strict=True)):
            rounded = ref.to(x.dtype)
            error[i] = _larger(error[i], x.double() - ref)
            plain_error[i] = _larger(plain_error[i], pt.double() - ref)
            slack[i] = _larger(slack[i], ((rounded + 0.3) - 0.3).double() - rounded.double())
    allowed = 2 * plain_error + 2 * slack
    rows = zip(NAMES, error.tolist(), plain_error.tolist(), allowed.tolist(), strict=True)
    return [Verdict(*row) for row in rows]


def number_of_pairs(inputs: Inputs) -> int:
    return inputs.k.shape[0] * inputs.k.shape[2]


def _larger(so_far: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """The larger magnitude, NaN if there is one."""
    return torch.maximum(so_far, difference.abs().max().cpu())


def _pairs(inputs: Inputs, grads: Gradients) -> Iterator[tuple[torch.Tensor, ...]]:
    """q, k, v, dout, dq, dk, dv of each pair: ``(group or 1, seqlen, head_dim)``."""
    kv_heads = inputs.k.shape[2]
    group = inputs.q.shape[2] // kv_heads
    dq, dk, dv = grads
    for batch in range(inputs.k.shape[0]):
        for kv_head in range(kv_heads):
            heads, kv = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
            cuts = (heads, kv, kv, heads, heads, kv, kv)
            tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, dq, dk, dv)
            yield tuple(t[batch, :, c].transpose(0, 1) for t, c in zip(tensors, cuts, strict=True))


def _autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, hidden: torch.Tensor
) -> Gradients:
    """Gradients of softmax(q kᵀ / √head_dim) v in the dtype of q; zeros for rows without keys."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    scores = (q * q.shape[2] ** -0.5) @ k.mT
    p = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
    # As a sum, so that the first backward kernel is no matrix product: cuBLAS warns where it is the
    # first in a thread, which has no context yet. The gradients are the same, dout times 1.
    return torch.autograd.grad(((p @ v) * dout).sum(), (q, k, v))
