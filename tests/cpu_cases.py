"""Attention problems for the CPU implementation, and what their gradients should be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dash import _C
from dash.support import make_problem

H200_SMS = 132


class Case(NamedTuple):
    """One attention; shapes are ``(batch, seqlen, heads, head_dim)``."""

    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    head_dim_v: int | None = None  # None: head_dim

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"q{self.q_shape}-kv{self.kv_shape}-{mask}-{str(self.dtype)[6:]}".replace(" ", "")


def problem_of(case: Case) -> object:
    return make_problem(case.q_shape, case.kv_shape, case.causal, head_dim_v=case.head_dim_v)


def accepted_strategies(case: Case) -> list[str]:
    problem = problem_of(case)
    return [name for name in _C.strategies() if _C.why_not(name, problem, H200_SMS) is None]


def random_inputs(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    of_v = case.head_dim_v or case.q_shape[3]
    shapes = (case.q_shape, case.kv_shape, (*case.kv_shape[:3], of_v), (*case.q_shape[:3], of_v))
    return tuple(torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)


def hidden_keys(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """``(seqlen_q, seqlen_k)`` bool, true where a query may not see a key."""
    row = torch.arange(seqlen_q)[:, None]
    return (torch.arange(seqlen_k)[None] > row + seqlen_k - seqlen_q) & causal


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by plain operations in the dtype of q; rows without keys give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    hidden = hidden_keys(q.shape[2], k.shape[2], causal)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1).masked_fill(hidden, 0.0)
    return (p @ v).transpose(1, 2), scores.logsumexp(-1)


def gradients(inputs: tuple[torch.Tensor, ...], causal: bool, dtype: torch.dtype) -> tuple:
    """out, lse and (dq, dk, dv) by autograd in ``dtype``."""
    q, k, v = (t.to(dtype).requires_grad_() for t in inputs[:3])
    out, lse = attend(q, k, v, causal)
    return out.detach(), lse.detach(), torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))


def assert_accurate(got: tuple, exact: tuple, plain: tuple) -> None:
    """DESIGN §6: max|x - ref| ≤ 2·max|pt - ref| + 2·max|((ref + 0.3) - 0.3) - ref|."""
    for name, x, ref, pt in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
        rounded = ref.to(x.dtype)
        allowed = 2 * (pt.double() - ref).abs().max()
        allowed += 2 * ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
        error = (x.double() - ref).abs().max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def backward(case: Case, inputs: tuple, out: torch.Tensor, lse: torch.Tensor, **more: object):
    q, k, v, dout = inputs
    return torch.ops.dash.attention_bwd(
        dout, q, k, v, out.to(case.dtype), lse.float(), causal=case.causal, **more
    )
