"""Layouts that broke other attention backwards, as whole kinds: shared/CASES.md 7, 8, 14."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import DEVICE, Inputs, Shape, gradients, needs_gpu, random_inputs, same_bits

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MASKS = (False, True)

# --- 7 and 8: strides and alignment -------------------------------------------------------------

STRIDED = Shape(2, 4, 2, 200, 333, 64)


def head_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a transposed view of (batch, heads, seqlen, head_dim)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_slice(tensor: torch.Tensor) -> torch.Tensor:
    full = torch.cat([tensor, torch.full_like(tensor[:, :128], torch.nan)], dim=1)
    return full[:, :-128]


def off_by_two_bytes(tensor: torch.Tensor) -> torch.Tensor:
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def odd_row_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of head_dim + 1 elements: no multiple of 16 bytes."""
    wide = tensor.new_full((*tensor.shape[:3], tensor.shape[3] + 1), torch.nan)
    return wide[..., :-1].copy_(tensor)


def last_dim_strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.new_full((*tensor.shape, 2), torch.nan)
    return wide[..., 0].copy_(tensor)


LAYOUTS = (head_major, sequence_slice, off_by_two_bytes, odd_row_stride, last_dim_strided)
TENSORS = ("dout", "q", "k", "v", "out")


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("name", [*TENSORS, "all"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_case_7_and_8_layouts(layout, name: str, causal: bool) -> None:
    """Any strides and any alignment: the same bits as contiguous, aligned tensors."""
    inputs = random_inputs(dataclasses.replace(STRIDED, causal=causal))
    names = TENSORS if name == "all" else (name,)
    changed = dataclasses.replace(inputs, **{n: layout(getattr(inputs, n)) for n in names})
    assert all(not getattr(changed, n).is_contiguous() or layout is off_by_two_bytes for n in names)
    assert same_bits(gradients(changed), gradients(inputs))


@pytest.mark.parametrize("causal", MASKS)
def test_case_7_expanded_scalar(causal: bool) -> None:
    """dO = a scalar with all strides 0, as the gradient of a sum arrives."""
    inputs = random_inputs(dataclasses.replace(STRIDED, causal=causal))
    expanded = torch.ones((), dtype=BF16, device=DEVICE).expand(inputs.q.shape)
    assert expanded.stride() == (0, 0, 0, 0)
    got = gradients(dataclasses.replace(inputs, dout=expanded))
    assert same_bits(got, gradients(dataclasses.replace(inputs, dout=expanded.contiguous())))


def test_case_7_lse_layouts() -> None:
    inputs = random_inputs(STRIDED)
    wanted = gradients(inputs)
    sequence_major = inputs.lse.transpose(1, 2).contiguous().transpose(1, 2)
    for lse in (sequence_major, inputs.lse[..., None]):
        assert same_bits(gradients(dataclasses.replace(inputs, lse=lse)), wanted)


# --- 14: offsets beyond 2^31 elements -----------------------------------------------------------

WIDE_ROW = 9728  # a row stride that puts row 220,753 beyond 2^31 elements
HEADS, HEAD_DIM = 16, 128


def wide_inputs(batch: int, seqlen: int, causal: bool) -> Inputs:
    """dO, q, k, v as column ranges of one (batch · seqlen, 9,728) buffer: 4.3 GB."""
    assert (batch * seqlen - 1) * WIDE_ROW > 2**31
    generator = torch.Generator(DEVICE).manual_seed(14)
    buffer = torch.randn(batch, seqlen, WIDE_ROW, generator=generator, device=DEVICE, dtype=BF16)
    width = HEADS * HEAD_DIM
    dout, q, k, v = (
        buffer[..., i * width : (i + 1) * width].unflatten(-1, (HEADS, HEAD_DIM)) for i in range(4)
    )
    out = torch.randn(q.shape, generator=generator, device=DEVICE, dtype=BF16)
    lse = torch.full((batch, HEADS, seqlen), 7.5, device=DEVICE)
    return Inputs(dout, q, k, v, out, lse, causal=causal)


@needs_gpu
@pytest.mark.parametrize("causal", MASKS)
def test_case_14_rows_beyond_two_to_the_31(causal: bool) -> None:
    """216 sequences of 1,024 rows: the offset is the batch stride's."""
    inputs = wide_inputs(216, 1024, causal)
    got = gradients(inputs)
    contiguous = Inputs(*(t.contiguous() for t in inputs.tensors()), causal=causal)
    assert same_bits(got, gradients(contiguous))
    last = inputs.sequences(215)
    assert same_bits([t[215:] for t in got], gradients(last))


@needs_gpu
@pytest.mark.slow
def test_case_14_one_sequence_beyond_two_to_the_31() -> None:
    """One sequence of 220,800 rows: the offset is the row stride's. Two calls of about a second."""
    inputs = wide_inputs(1, 220_800, causal=True)
    got = gradients(inputs)
    assert same_bits(got, gradients(dataclasses.replace(inputs, dout=inputs.dout.contiguous())))
    contiguous = Inputs(*(t.contiguous() for t in inputs.tensors()), causal=True)
    assert same_bits(got, gradients(contiguous))


@needs_gpu
@pytest.mark.slow
def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    """Every tensor, output and workspace is beyond 2^31 elements: about 45 GB."""
    shape = Shape(1032, HEADS, HEADS, 1024, 1024, HEAD_DIM, causal=True)
    assert shape.batch * shape.seqlen_q * HEADS * HEAD_DIM > 2**31
    torch.cuda.empty_cache()
    inputs = random_inputs(shape)
    got = gradients(inputs)
    for sequence in (0, 515, 1031):
        alone = gradients(inputs.sequences(sequence))
        assert same_bits([t[sequence : sequence + 1] for t in got], alone)
