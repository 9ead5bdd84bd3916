"""The gradients are accurate (DESIGN.md §6), for every strategy that may run the problem."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from accuracy import assert_accurate, judged_inputs
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    DEVICE,
    ON_GPU,
    Shape,
    bits,
    gradients,
    same_bits,
    skip_if_refused,
    with_strategies,
)

import dash

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
MASKS = (False, True)

# batch, heads, kv_heads, seqlen_q, seqlen_k
LAYOUTS = (
    (2, 4, 4, 256, 256),  # whole tiles
    (1, 6, 2, 384, 640),  # GQA, more keys than queries
    (1, 4, 1, 640, 384),  # MQA; with the causal mask, rows without keys
    (3, 2, 2, 113, 203),  # ragged
    (1, 8, 2, 1024, 1024),
)
HEAD_DIMS = (8, 40, 64, 72, 80, 128)

GRID = [
    Shape(*layout, head_dim, causal, dtype)
    for layout, head_dim, causal, dtype in itertools.product(
        LAYOUTS, HEAD_DIMS, MASKS, (BF16, FP16)
    )
]
SCALES = [
    Shape(2, 4, 2, 200, 333, head_dim, causal, scale=scale)
    for head_dim, causal, scale in itertools.product((64, 128), MASKS, (0.3, -0.2, 0.0))
]
LONG = [
    Shape(1, 2, 1, seqlen, seqlen, head_dim, causal)
    for seqlen, head_dim, causal in itertools.product((4096, 8000), (64, 128), MASKS)
]
MANY_HEADS = [
    Shape(65_600, 1, 1, 16, 24, 64, causal=True),  # batches
    Shape(2, 65_600, 65_600, 16, 24, 64, causal=True),  # heads
    Shape(300, 256, 64, 16, 24, 128),  # their product
]


def check(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    assert_accurate(gradients(inputs, strategy), reference, plain, f"{shape} {strategy}")


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(GRID))
def test_gradients_are_accurate(shape: Shape, strategy: str) -> None:
    check(shape, strategy)


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SCALES))
def test_any_scale_is_accurate(shape: Shape, strategy: str) -> None:
    """A negative scale turns the order of the scores around; zero makes dq and dk zero."""
    check(shape, strategy)
    if shape.scale == 0.0:
        dq, dk, _ = gradients(judged_inputs(shape)[0], strategy)
        assert not dq.any()
        assert not dk.any()


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(LONG))
def test_long_sequences_are_accurate(shape: Shape, strategy: str) -> None:
    check(shape, strategy)


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(MANY_HEADS))
def test_more_heads_than_a_grid_axis_holds(shape: Shape, strategy: str) -> None:
    check(shape, strategy)


@pytest.mark.parametrize("causal", MASKS)
def test_a_missing_scale_is_the_root_of_the_head_dim(causal: bool) -> None:
    shape = Shape(1, 2, 2, 130, 130, 72, causal)
    inputs = judged_inputs(shape)[0]
    given = dataclasses.replace(inputs, scale=72**-0.5)
    other = dataclasses.replace(inputs, scale=64**-0.5)
    assert same_bits(gradients(inputs), gradients(given))
    assert not same_bits(gradients(inputs), gradients(other))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_exact_values(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """CASES.md 1: q = k = v = dO = 1, scale 1."""
    ones = torch.ones(4, 16, heads, 64, device=DEVICE, dtype=dtype)
    kv = torch.ones(4, 16, kv_heads, 64, device=DEVICE, dtype=dtype)
    group = heads // kv_heads
    rows = torch.arange(1, 17, device=DEVICE, dtype=torch.float32)
    for causal in MASKS:
        keys = rows if causal else torch.full_like(rows, 16)
        lse = (64 + keys.log()).expand(4, heads, 16).contiguous()
        dq, dk, dv = torch.ops.dash.attention_bwd(ones, ones, kv, kv, ones, lse, 1.0, causal)
        assert not dq.any()
        assert not dk.any()
        wanted = torch.ones(16, device=DEVICE)
        if causal:
            wanted = (1 / rows).flip(0).cumsum(0).flip(0)
        wanted = (group * wanted)[None, :, None, None].expand(dv.shape)
        torch.testing.assert_close(dv.float(), wanted, rtol=2**-7, atol=0)


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_is_the_tensors_own() -> None:
    """CASES.md 1: tensors on the second GPU while the first is current."""
    inputs = judged_inputs(Shape(4, 32, 32, 16, 16, 64, dtype=FP16))[0]
    there = dataclasses.replace(
        inputs,
        **{n: getattr(inputs, n).to("cuda:1") for n in ("dout", "q", "k", "v", "out", "lse")},
    )
    with torch.cuda.device(0):
        got = gradients(there)
        assert torch.cuda.current_device() == 0
    assert all(t.device.index == 1 for t in got)
    assert same_bits([t.to("cuda:0") for t in got], gradients(inputs))


@pytest.mark.parametrize("causal", MASKS)
def test_autograd_reaches_the_same_gradients(causal: bool) -> None:
    """dash.attention differentiates through the op, with the forward it chose."""
    shape = Shape(2, 4, 2, 256, 256, 64, causal)
    inputs, reference, plain = judged_inputs(shape)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = dash.attention(*leaves, causal=causal)
    got = torch.autograd.grad(out, leaves, inputs.dout)
    assert_accurate(got, reference, plain, f"{shape} through dash.attention")


def test_nan_in_one_sequence_stays_there() -> None:
    """Rows of other sequences never reach a sequence, even when they hold NaN."""
    shape = Shape(3, 2, 2, 70, 90, 64)
    inputs = judged_inputs(shape)[0]
    clean = gradients(inputs)
    poisoned = dataclasses.replace(
        inputs, **{n: getattr(inputs, n).clone() for n in ("dout", "q", "k", "v", "out", "lse")}
    )
    for tensor in poisoned.tensors():
        tensor[1] = torch.nan
    got = gradients(poisoned)
    for x, before in zip(got, clean, strict=True):
        assert torch.equal(bits(x[0]), bits(before[0]))
        assert torch.equal(bits(x[2]), bits(before[2]))
        assert x[1].isnan().any()
