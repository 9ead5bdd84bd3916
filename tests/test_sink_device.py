"""Sinks and the gradient of lse on the GPU: against fp64, repeated, dense and packed."""

from __future__ import annotations

import pytest
import torch

import dash

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def exact(tensors: list[torch.Tensor], left: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64, a sink as one more column of scores; causal."""
    q, k, v, sink = tensors
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    rows = torch.arange(q.shape[2], device="cuda")
    away = rows[:, None] - rows
    hidden = (away < 0) if left is None else (away < 0) | (away > left)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf)
    scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    p = scores.softmax(-1)[..., :-1]
    return (p @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "seqlen", "left"),
    [(64, 8, 64, 700, 128), (64, 8, 64, 512, None), (4, 4, 128, 1000, None), (8, 1, 72, 333, 40)],
)
def test_gradients_match_fp64_and_repeat(heads, kv_heads, head_dim, seqlen, left) -> None:
    torch.manual_seed(0)
    q, dout = (normal(2, seqlen, heads, head_dim) for _ in range(2))
    k, v = (normal(2, seqlen, kv_heads, head_dim) for _ in range(2))
    sink = torch.linspace(-2, 4, heads, device="cuda")
    dlse = normal(2, heads, seqlen, dtype=torch.float32)
    tensors = [t.requires_grad_() for t in (q, k, v, sink)]

    def gradients() -> tuple[torch.Tensor, ...]:
        outputs = dash.attention(q, k, v, causal=True, window_left=left, sink=sink, return_lse=True)
        return torch.autograd.grad(outputs, tensors, (dout, dlse))

    got = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), got, strict=True))
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(exact(doubles, left), doubles, (dout.double(), dlse.double()))
    for name, x, want in zip(("dq", "dk", "dv", "dsink"), got, wanted, strict=True):
        error = (x.double() - want).norm() / want.norm()
        assert error < (3e-2 if name == "dsink" else 1e-2), f"{name}: {error:.3g}"


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_of_lse_alone_and_packed(causal) -> None:
    lengths = (300, 0, 1000, 65)
    starts = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32).cuda()
    total = sum(lengths) + 40
    q, dout, out = (normal(total, 8, 64) for _ in range(3))
    k, v = (normal(total, 2, 64) for _ in range(2))
    lse, dlse = (normal(8, total, dtype=torch.float32) + 6 for _ in range(2))
    dlse[:, sum(lengths) :] = torch.nan
    arguments = (dout, q, k, v, out, lse, starts, starts)
    got = torch.ops.dash.attention_varlen_bwd(*arguments, causal=causal, dlse=dlse)
    without = torch.ops.dash.attention_varlen_bwd(*arguments, causal=causal)
    assert torch.equal(got[2], without[2])  # dV knows nothing of it
    assert not torch.equal(got[0], without[0])
    for start, length in zip(starts.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        one = [t[None, rows] for t in (dout, q, k, v, out)]
        of_rows = [t[None, :, rows] for t in (lse, dlse)]
        dense = torch.ops.dash.attention_bwd(*one, of_rows[0], causal=causal, dlse=of_rows[1])
        assert all(torch.equal(x[rows], want[0]) for x, want in zip(got, dense, strict=True))


def test_a_gradient_of_zeros_is_none() -> None:
    q, dout, out = (normal(1, 500, 4, 128) for _ in range(3))
    k, v = (normal(1, 500, 4, 128) for _ in range(2))
    lse = normal(1, 4, 500, dtype=torch.float32) + 6
    call = torch.ops.dash.attention_bwd
    with_zeros = call(dout, q, k, v, out, lse, causal=True, dlse=torch.zeros_like(lse))
    without = call(dout, q, k, v, out, lse, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(with_zeros, without, strict=True))
