"""Whole transformer blocks: right mathematics, right gradients, rows with what is measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dash.bench import blocks
from dash.bench.block_models import BLOCK_MODELS, BlockModel, Experts, Permuted, turned
from dash.bench.block_tables import block_markdown
from dash.bench.blocks import BlockBench, block_step, find_attention, repeats_bitwise
from dash.bench.measure import Window
from dash.bench.providers import Unavailable
from dash.bench.run import Bench


def tiny(model: BlockModel) -> BlockModel:
    """The same parts with 64-wide heads and few of them."""
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 64, "hidden": 32, "mlp_hidden": 48}
    return dataclasses.replace(model, **heads, cases=((1, 32),))


def plain(causal: bool) -> blocks.BlockAttention:
    """Attention by PyTorch, for the CPU."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    return blocks.BlockAttention(call, "plain")


@pytest.mark.parametrize("name", BLOCK_MODELS)
def test_sizes_are_a_models(name: str) -> None:
    model = BLOCK_MODELS[name]
    assert model.heads % model.kv_heads == 0
    assert model.heads * model.head_dim == model.hidden
    wanted = {(1, 8192), (1, 16_384), (1, 32_768)} if model.causal else {(16, 4096)}
    assert set(model.cases) == wanted


@pytest.mark.parametrize("name", BLOCK_MODELS)
def test_dash_in_a_block_is_plain_attention_in_it(name: str) -> None:
    """Gradients of the input and of every weight, and they repeat bit for bit."""
    model = tiny(BLOCK_MODELS[name])
    step = block_step(model, find_attention("dash", model.causal), 1, 32)
    wanted = block_step(model, plain(model.causal), 1, 32)
    for got, right in zip(step(), wanted(), strict=True):
        assert (got - right).float().norm() <= 0.05 * right.float().norm() + 1e-6
    assert repeats_bitwise(step)


def test_experts_are_each_tokens_two_best() -> None:
    torch.manual_seed(0)
    experts = Experts(16, 24).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    wanted = torch.zeros_like(x)
    weights = experts.router(x).softmax(-1, dtype=torch.float32)
    best, chosen = weights.topk(2)
    best = (best / best.sum(-1, keepdim=True)).double()
    for b in range(2):
        for t in range(9):
            for w, e in zip(best[b, t], chosen[b, t], strict=True):
                wanted[b, t] += w * experts.experts[e](x[b, t])
    assert torch.allclose(experts(x), wanted)
    leaves = [x, *experts.parameters()]
    dout = torch.randn_like(x)
    got = torch.autograd.grad(experts(x), leaves, dout, allow_unused=True)
    right = torch.autograd.grad(wanted, leaves, dout, allow_unused=True)
    for a, b in zip(got, right, strict=True):
        assert b is None or torch.allclose(a, b, atol=1e-6)


def test_permuted_rows_have_the_gradient_of_indexing() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(7)
    assert torch.autograd.gradcheck(lambda t: Permuted.apply(t, order), (x,))


def test_rotary_turns_by_the_distance_alone() -> None:
    x = torch.randn(1, 1, 1, 64).expand(1, 12, 1, 64)
    scores = torch.einsum("bqhd,bkhd->qk", turned(x), turned(x))
    for distance in range(12):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


def test_absent_attention_has_its_reason() -> None:
    with pytest.raises(Unavailable, match="flash_attn_interface does not load"):
        find_attention("fa3_det", True)


def test_rows_of_a_block_and_a_derived_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; FA3's backward alone is told to take 5 ms, dash's 3."""
    model = tiny(BLOCK_MODELS["llama3-8b"])
    alone = {"dash": 3.0, "fa3_det": 5.0}

    def measure(self: Bench, shape: object) -> list[dict[str, object]]:
        names = [provider.name for provider in self.providers]
        return [{"provider": n, "ms": alone[n], "version": "9"} for n in names]

    monkeypatch.setattr(blocks.Bench, "measure", measure)
    times = iter([Window(20.0, 1.0, 2.0), Window(4.0, 1.0, 2.0)] * 3)
    monkeypatch.setattr(blocks, "sustained_window", lambda *_: next(times))
    monkeypatch.setattr(blocks, "window_orders", lambda names, rounds: [range(names)] * rounds)
    bench = BlockBench(["dash", "fa3_det", "cudnn_nondet"], 0.001, 3)
    dash_row, derived = bench.measure(model, 1, 32)
    assert dash_row["ms"] == 20.0
    assert dash_row["share"] == 0.2
    assert dash_row["bitwise"] == 1
    assert derived["provider"] == "fa3_det"
    assert (derived["ms"], derived["attention_ms"], derived["derived"]) == (22.0, 6.0, 1)
    assert any("cudnn_nondet" in line for line in bench.absent.lines(1))
    assert set(derived) <= set(dash_row)
    written = [{k: str(v) for k, v in row.items()} for row in (dash_row, derived)]
    (line,) = (x for x in block_markdown(written).splitlines() if x.startswith("| llama3"))
    assert "| 20.00 | 20% | yes | ~1.100 | about 5%" in line
