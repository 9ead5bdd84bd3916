"""The forwards of others on the GPU: windows, repeats, and what is said of a sequence's bits."""

from __future__ import annotations

import pytest
import torch

import dash
from dash.forward import ForwardCall, choose_forward, plain_forward, run_forward

pytestmark = pytest.mark.gpu


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("window", [(64, None), (0, 64), (100, 37)])
@pytest.mark.parametrize("forward", ["fa3", "flash"])
def test_forwards_know_windows(forward, window) -> None:
    q, k, v = normal(2, 300, 4, 64), normal(2, 420, 2, 64), normal(2, 420, 2, 64)
    call = ForwardCall(q, k, v, 0.125, False, *window)
    try:
        choose_forward(call, forward)
    except dash.UnsupportedError as error:
        pytest.skip(str(error))
    out, lse = run_forward(call, forward)
    wanted, wanted_lse = plain_forward(*call)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("forward", ["fa3", "cudnn", "flash", "plain"])
def test_forwards_repeat_and_plans_name_them(forward) -> None:
    q, k, v = normal(2, 1024, 8, 128), normal(2, 1024, 2, 128), normal(2, 1024, 2, 128)
    more = {"causal": True, "forward": forward}
    try:
        plan = dash.plan(q.shape, k.shape, q.dtype, device="cuda", **more)
    except dash.UnsupportedError as error:
        pytest.skip(str(error))
    assert plan.forward == forward
    out, lse = dash.attention(q, k, v, return_lse=True, **more)
    for _ in range(50):
        again = dash.attention(q, k, v, return_lse=True, **more)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("forward", ["flash", "plain"])
@pytest.mark.parametrize("window_left", [None, 100])
def test_packing_changes_no_bit_of_the_whole_step(forward, window_left) -> None:
    """Out and gradients of each document, in two packs and alone."""
    lengths = (700, 65, 1300, 1, 300)
    documents = [[normal(n, heads, 64) for heads in (8, 2, 2, 8)] for n in lengths]

    def step(order: tuple[int, ...]) -> dict[int, tuple[torch.Tensor, ...]]:
        """out, dq, dk, dv of the documents by number, packed in this order."""
        packed = [torch.cat([documents[i][t] for i in order]) for t in range(4)]
        q, k, v = (t.requires_grad_() for t in packed[:3])
        ends = torch.tensor([lengths[i] for i in order]).cumsum(0)
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int().cuda()
        longest = max(lengths[i] for i in order)
        out = dash.attention_varlen(
            q, k, v, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
            window_left=window_left, forward=forward,
        )  # fmt: skip
        results = (out, *torch.autograd.grad(out, (q, k, v), packed[3]))
        parts = zip(*(t.split([lengths[i] for i in order]) for t in results), strict=True)
        return dict(zip(order, parts, strict=True))

    packs = [step((0, 1, 2, 3, 4)), step((3, 2, 4, 0, 1))]
    for i in range(len(lengths)):
        alone = step((i,))[i]
        for pack in packs:
            assert all(torch.equal(a, b) for a, b in zip(pack[i], alone, strict=True))
