"""Groups of q heads cut into parts: the plan, auto's choice, and the CPU implementation."""

from __future__ import annotations

import pytest
import torch
from inputs import gradients
from split_cases import SUMS, expected, order_revealing_heads

import dash
from dash import _C
from dash.auto import choose
from dash.support import make_problem

CPU = torch.device("cpu")
Q, KV = (2, 700, 12, 64), (2, 700, 2, 64)


def plan(parts: int = 0, strategy: str = "staggered", **changes: object) -> dash.Plan:
    shapes = {"q_shape": Q, "kv_shape": KV, "dtype": torch.bfloat16, "device": "cpu"} | changes
    return dash.plan(**shapes, causal=True, strategy=strategy, group_split=parts)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_plan_counts_the_chains_of_every_part(parts) -> None:
    p = plan(parts)
    assert p.group_split == parts
    assert p.chains == parts * plan(1).chains
    assert ("parts with chains of their own" in str(p)) == (parts > 1)
    more = 2 * 4 * 64 * 6 * 128 * 2 * 2 * parts if parts > 1 else 0  # fp32 dK and dV of each chain
    assert p.workspace_bytes - plan(1).workspace_bytes == more


def test_named_strategies_keep_groups_whole_unless_asked() -> None:
    assert plan().group_split == 1
    assert plan(strategy="auto").group_split == 2
    assert plan(1, strategy="auto").group_split == 1
    assert plan(6, strategy="auto").strategy == "zigzag"


def test_fingerprint_names_the_parts() -> None:
    prints = {plan(parts).fingerprint for parts in (1, 2, 3, 6)}
    assert len(prints) == 4
    seven = {"q_shape": (7, *Q[1:]), "kv_shape": (7, *KV[1:])}
    assert plan(3, **seven).fingerprint == plan(3).fingerprint


@pytest.mark.parametrize("parts", [-1, 4, 5, 12])
def test_parts_must_divide_the_group(parts) -> None:
    message = f"group_split is {parts}; required: 0, or a divisor of heads / kv_heads, which is 6"
    with pytest.raises(dash.UnsupportedError, match=message):
        plan(parts)
    inputs = order_revealing_heads(1, 1, 64, torch.bfloat16, CPU)
    with pytest.raises(dash.UnsupportedError, match="a divisor of heads / kv_heads, which is 4"):
        torch.ops.dash.attention_bwd(*inputs.tensors(), 1.0, group_split=3)
    with pytest.raises(dash.UnsupportedError, match="a divisor of heads / kv_heads, which is 4"):
        dash.attention(inputs.q, inputs.k, inputs.v, group_split=3)


@pytest.mark.parametrize("problem", [{"kv_heads": 6, "group_split": 4}, {"group_split": 0}])
def test_the_binding_checks_the_parts(problem) -> None:
    sizes = {"batch": 1, "heads": 12, "kv_heads": 6, "seqlen_q": 64, "seqlen_k": 64}
    with pytest.raises(ValueError, match="group_split"):
        _C.Problem(**sizes | {"causal": True, "tile_q": 64, "tile_kv": 128} | problem)


@pytest.mark.parametrize(
    ("seqlen", "heads", "kv_heads", "causal", "parts"),
    [
        (8192, 32, 8, True, 1),
        (8192, 28, 4, True, 1),
        (512, 28, 4, True, 1),
        (5000, 28, 4, True, 1),  # 1.6 sequences of 40 tiles
        (8192, 8, 1, True, 4),  # 64 chains a sequence, wanted 256
        (8192, 8, 1, False, 2),  # wanted 128
        (4096, 8, 1, True, 4),  # two sequences of 32
        (8192, 21, 3, True, 7),  # 192 chains, and 7 has no other divisor
        (8192, 7, 1, True, 7),
        (16384, 8, 1, True, 2),
        (32768, 8, 1, True, 1),
        (8192, 2, 1, True, 2),  # all there is
        (8192, 1, 1, True, 1),
        (100, 64, 1, True, 4),
    ],
)
def test_auto_splits_where_kv_heads_are_few(seqlen, heads, kv_heads, causal, parts) -> None:
    one = make_problem((1, seqlen, heads, 128), (1, seqlen, kv_heads, 128), causal)
    assert choose(one, 132).group_split == parts
    many = dash.plan(
        (9, seqlen, heads, 128), (9, seqlen, kv_heads, 128), torch.float16, causal=causal
    )
    assert many.group_split == parts


# ---- The CPU implementation ----------------------------------------------------------------------


@pytest.mark.parametrize("parts", SUMS)
def test_parts_are_added_in_ascending_order(parts) -> None:
    inputs = order_revealing_heads(2, 3, 64, torch.bfloat16, CPU)
    _, dk, dv = gradients(inputs, "ascending", parts)
    wanted_dk, wanted_dv = expected(inputs, parts)
    assert torch.equal(dk, wanted_dk)
    assert torch.equal(dv, wanted_dv)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_split_groups_are_the_same_gradients(causal) -> None:
    generator = torch.Generator().manual_seed(1)
    q, dout = (
        torch.randn(2, 300, 12, 64, generator=generator, dtype=torch.float16) for _ in range(2)
    )
    k, v = (torch.randn(2, 200, 2, 64, generator=generator, dtype=torch.float16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = {}
    for parts in (1, 2, 6):
        out = dash.attention(q, k, v, causal=causal, strategy="ascending", group_split=parts)
        grads[parts] = torch.autograd.grad(out, leaves, dout)
    for parts in (2, 6):
        assert torch.equal(grads[parts][0], grads[1][0])  # ascending: a q tile's turns are the same
        for split, whole in zip(grads[parts][1:], grads[1][1:], strict=True):
            torch.testing.assert_close(split, whole, rtol=2**-9, atol=2**-8)
            assert not torch.equal(split, whole)


def test_opcheck_of_a_split_group() -> None:
    inputs = order_revealing_heads(1, 1, 64, torch.bfloat16, CPU)
    arguments = (*inputs.tensors(), 1.0, False, "auto", 2)
    torch.library.opcheck(torch.ops.dash.attention_bwd, arguments)
