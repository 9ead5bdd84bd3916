"""Inputs that broke other attention backwards, as whole kinds: shared/CASES.md 2 to 6, 12, 13.

Case 1 is in test_backward.py, layouts and offsets (7, 8, 14) in test_layouts.py, what touches
streams, graphs and memory (9 to 11, 15) in test_determinism.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from accuracy import assert_accurate, inputs_of, judged_inputs, relative_error
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    CASE_5_LENGTHS,
    DEVICE,
    Inputs,
    Shape,
    bits,
    gradients,
    needs_gpu,
    random_inputs,
    same_bits,
    skip_if_refused,
    with_strategies,
)
from kernel_call import backward_into

from dash import UnsupportedError

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
MASKS = (False, True)


# --- 2: scores so low that exp(-lse) overflows in a KV tile's zero-filled tail ------------------

LOW_SCORES = [
    Shape(1, 1, 1, seqlen, seqlen, head_dim, causal, dtype)
    for head_dim, lengths in (
        (64, (704, 64, 192, 320, 832, 1088, 1216, 2112, 640, 768, 1000, 1280)),
        (128, (704, 192, 1000, 1280)),
    )
    for seqlen, causal, dtype in itertools.product(lengths, MASKS, (BF16, FP16))
]


@pytest.mark.parametrize("sign", [-1, 1], ids=("low", "high"))
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(LOW_SCORES))
def test_case_2_extreme_lse(shape: Shape, strategy: str, sign: int) -> None:
    skip_if_refused(shape, strategy)
    generator = torch.Generator(DEVICE).manual_seed(2)

    def normal() -> torch.Tensor:
        return torch.randn(shape.q_shape, generator=generator, device=DEVICE, dtype=shape.dtype)

    q, k, v, dout = 0.1 * normal(), 0.1 * normal(), normal(), normal()
    q[..., 0] = 1
    k[..., 0] = sign * {64: 960, 128: 1408}[shape.head_dim]  # scores of about ±120
    inputs, reference = inputs_of(q, k, v, dout, None, shape.causal)
    assert inputs.lse.abs().min() > 112
    assert inputs.lse.abs().max() < 135
    got = gradients(inputs, strategy)
    # The rule of DESIGN.md §6 is loose here (plain PyTorch rounds scores of 120 to steps of a
    # half), so: as good as with ordinary scores. Column 0 of dq is k's constant times a sum that
    # cancels; what rounding leaves of it is no error, as long as it is finite.
    for name, x, ref in zip(("dq", "dk", "dv"), got, reference, strict=True):
        assert torch.isfinite(x).all(), name
        columns = slice(1, None) if name == "dq" else slice(None)
        assert relative_error(x[..., columns], ref[..., columns]) < 0.02, name


# --- 3: one token -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
def test_case_3_one_token(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    for seed in range(5):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        q, k, v, dout = (
            torch.randn(1, 1, 1, head_dim, generator=generator, device=DEVICE, dtype=dtype)
            for _ in range(4)
        )
        inputs, _ = inputs_of(3 * q, 3 * k, 3 * v, dout, None, causal)
        dq, dk, dv = gradients(inputs)
        assert torch.equal(dv, dout)
        # 0 in exact arithmetic; dP and delta are the same fp32 sum in two orders.
        assert dq.abs().max() < 2e-3
        assert dk.abs().max() < 2e-3


# --- 4: causal, rows without keys ---------------------------------------------------------------

KEYLESS = [
    Shape(1, 2, 1, seqlen_q, seqlen_k, head_dim, True)
    for (seqlen_q, seqlen_k), head_dim in itertools.product(
        ((2048, 1024), (300, 100), (1000, 1), (129, 128), (257, 255)), (64, 128)
    )
]


@pytest.mark.parametrize("lse_of_nothing", [float("-inf"), float("inf")])
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(KEYLESS))
def test_case_4_rows_without_keys(shape: Shape, strategy: str, lse_of_nothing: float) -> None:
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    keyless = shape.seqlen_q - shape.seqlen_k
    inputs.lse[:, :, :keyless] = lse_of_nothing
    dq, dk, dv = gradients(inputs, strategy)
    assert not dq[:, :keyless].any()
    assert_accurate((dq, dk, dv), reference, plain, str(shape))

    square = Inputs(
        *(t[:, keyless:].contiguous() for t in (inputs.dout, inputs.q)),
        inputs.k,
        inputs.v,
        inputs.out[:, keyless:].contiguous(),
        inputs.lse[:, :, keyless:].contiguous(),
        causal=True,
    )
    wanted = gradients(square)
    for x, y in zip((dq[:, keyless:], dk, dv), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=4e-3)


# --- 5: ragged and unequal lengths --------------------------------------------------------------

LENGTHS = [
    Shape(1, 6, kv_heads, seqlen_q, seqlen_k, head_dim, causal, dtype)
    for (head_dim, dtype), (seqlen_q, seqlen_k), kv_heads, causal in itertools.product(
        ((128, BF16), (64, FP16)), CASE_5_LENGTHS, (6, 2, 1), MASKS
    )
]


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(LENGTHS))
def test_case_5_lengths(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    assert_accurate(gradients(inputs, strategy), reference, plain, str(shape))


# --- 6: neighbours of a tile's tail -------------------------------------------------------------

TAILS = [
    Shape(2, 4, kv_heads, seqlen, seqlen, head_dim, causal)
    for seqlen, kv_heads, head_dim, causal in itertools.product(
        (1, 2, 63, 64, 65, 127, 129, 191, 193), (4, 2), (64, 72, 128), MASKS
    )
]
GUARD_ROWS = 5


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN buffer and the view in it that holds (batch, seqlen, heads, head_dim) ``tensor``.

    Head-major, with guard rows after every head and a guard head after every batch.
    """
    batch, seqlen, heads, head_dim = tensor.shape
    buffer = tensor.new_full((batch, heads + 1, seqlen + GUARD_ROWS, head_dim), torch.nan)
    view = buffer[:, :heads, :seqlen].transpose(1, 2)
    view.copy_(tensor)
    return buffer, view


def guards_of(buffer: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The buffer's bits with the view's elements zeroed."""
    copy = buffer.clone()
    heads, seqlen = view.shape[2], view.shape[1]
    copy[:, :heads, :seqlen] = 0
    return bits(copy)


@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(TAILS))
def test_case_6_guard_rows(shape: Shape, strategy: str) -> None:
    """Inputs are read, and outputs written, inside their rows only."""
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    lse_buffer = inputs.lse.new_full((*shape.lse_shape[:2], shape.seqlen_q + GUARD_ROWS), torch.nan)
    lse = lse_buffer[:, :, : shape.seqlen_q]
    lse.copy_(inputs.lse)
    views = [guarded(t)[1] for t in (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out)]
    inside = Inputs(*views, lse, shape.scale, shape.causal)

    empty = [torch.full_like(t, torch.nan) for t in (inputs.q, inputs.k, inputs.v)]
    buffers, grads = zip(*(guarded(t) for t in empty), strict=True)
    before = [guards_of(*pair) for pair in zip(buffers, grads, strict=True)]
    backward_into(grads, shape, inside, strategy)
    after = [guards_of(*pair) for pair in zip(buffers, grads, strict=True)]

    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a guard changed"
    assert_accurate(grads, reference, plain, str(shape))
    assert same_bits([t.contiguous() for t in grads], gradients(inputs, strategy))


# --- 12: empty problems -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 64, 64), (2, 0, 64), (2, 64, 0), (2, 0, 0)]
)
def test_case_12_empty(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q = torch.randn(batch, seqlen_q, 4, 64, device=DEVICE, dtype=BF16)
    kv = torch.randn(batch, seqlen_k, 2, 64, device=DEVICE, dtype=BF16)
    lse = torch.full((batch, 4, seqlen_q), -torch.inf, device=DEVICE)
    dq, dk, dv = gradients(Inputs(q, q, kv, kv, torch.zeros_like(q), lse, causal=causal))
    assert dq.shape == q.shape
    assert dk.shape == dv.shape == kv.shape
    assert dq.dtype == dk.dtype == dv.dtype == BF16
    assert not dq.any()
    assert not dk.any()
    assert not dv.any()


# --- 13: what is refused, before anything is launched -------------------------------------------


def refused(change: str) -> tuple[Inputs, tuple[str, ...]]:
    """Inputs with one fault, and the words that its error must hold."""
    base = Shape(2, 4, 2, 64, 64, 64)
    good = random_inputs(base)
    if change == "heads":
        return random_inputs(dataclasses.replace(base, heads=33)), ("33", "2", "heads")
    if change == "head_dim":
        return random_inputs(dataclasses.replace(base, head_dim=100)), ("head_dim", "100", "8")
    faults = {
        "v dtype": ({"v": good.v.float()}, ("v ", "float32", "bfloat16")),
        "lse dtype": ({"lse": good.lse.half()}, ("softmax_lse", "float16", "float32")),
        "lse shape": ({"lse": good.lse[:, :, :-1]}, ("softmax_lse", "63", "64")),
        "k and v shapes": ({"v": good.v[:, :-1]}, ("v ", "63", "64")),
        "dout shape": ({"dout": good.dout[:, :-1]}, ("dout", "63", "64")),
        "rank": ({"q": good.q[0]}, ("q ", "3", "4")),
        "scale": ({"scale": float("nan")}, ("softmax_scale", "nan")),
    }
    fault, words = faults[change]
    return dataclasses.replace(good, **fault), words


@pytest.mark.parametrize(
    "change",
    [
        "heads",
        "head_dim",
        "v dtype",
        "lse dtype",
        "lse shape",
        "k and v shapes",
        "dout shape",
        "rank",
        "scale",
    ],
)
def test_case_13_refusals_name_argument_given_and_wanted(change: str) -> None:
    inputs, words = refused(change)
    with pytest.raises(UnsupportedError) as error:
        gradients(inputs)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_case_13_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"strategy.*'fastest'.*ascending"):
        gradients(random_inputs(Shape(1, 2, 2, 64, 64, 64)), "fastest")
