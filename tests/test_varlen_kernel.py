"""Packed sequences on the GPU: the bits of the dense call, whatever lies around a sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, ON_GPU, needs_gpu
from pack_cases import HEADS, LENGTHS, fp64_gradients, pack_on_device, pack_shapes, strategies_of
from packs import (
    Pack,
    PackShape,
    all_same,
    assert_bits_of_dense,
    attended_pack,
    length_tensors,
    poison_rows_of_none,
    same_bits,
    with_order,
)

pytestmark = pytest.mark.gpu


def packs() -> list[PackShape]:
    return [
        PackShape(lengths, heads, kv_heads, head_dim, causal)
        for lengths, (heads, kv_heads), head_dim, causal in itertools.product(
            LENGTHS.values(), HEADS, (64, 128), (False, True)
        )
    ]


# ---- Bits of the dense call ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", packs(), ids=str)
def test_every_strategy_has_the_bits_of_the_dense_call(shape: PackShape) -> None:
    pack = pack_on_device(shape)
    for strategy in strategies_of(shape):
        assert_bits_of_dense(pack, pack.gradients(strategy), strategy)


@pytest.mark.parametrize("shape", packs()[4:8], ids=str)
def test_every_group_split_has_the_bits_of_the_dense_call(shape: PackShape) -> None:
    pack = pack_on_device(shape)
    for strategy, split in itertools.product(strategies_of(shape), (2, 4)):
        assert_bits_of_dense(pack, pack.gradients(strategy, split), strategy, split)


@settings(max_examples=150 if ON_GPU else 10, deadline=None)
@given(pack_shapes(max_sequences=8, windows=True), st.data())
def test_random_packs_have_the_bits_of_the_dense_call(shape: PackShape, data) -> None:
    group = shape.heads // shape.kv_heads
    split = data.draw(st.sampled_from([0, *(n for n in range(1, group + 1) if group % n == 0)]))
    strategy = data.draw(st.sampled_from(strategies_of(shape)))
    pack = pack_on_device(shape)
    assert_bits_of_dense(pack, pack.gradients(strategy, split), strategy, split)


@pytest.mark.parametrize("causal", [False, True])
def test_order_and_neighbours_change_no_bit(causal) -> None:
    pack = pack_on_device(PackShape(LENGTHS["unequal"] + LENGTHS["ragged"], 8, 2, 128, causal))
    before = list(pack.sequences_of(pack.gradients()))
    for first in range(3):
        order = list(range(first, len(before)))[:: -1 if first % 2 else 1]
        moved = with_order(pack, order)
        for place, grads in enumerate(moved.sequences_of(moved.gradients())):
            assert all_same(grads, before[order[place]])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_neighbour_of_nan_changes_no_bit(value, causal, head_dim) -> None:
    pack = pack_on_device(PackShape(LENGTHS["ragged"], 4, 2, head_dim, causal, tails=(9, 9)))
    before = list(pack.sequences_of(pack.gradients()))
    poisoned = 3
    for name, t in pack.tensors.items():
        rows = pack.rows(poisoned, 1 if name in "kv" else 0)
        if name == "softmax_lse":
            t[:, rows] = value
        else:
            t[rows] = value
    for index, grads in enumerate(pack.sequences_of(pack.gradients())):
        assert index == poisoned or all_same(grads, before[index]), index


@pytest.mark.parametrize("causal", [False, True])
def test_case_31_empty_sequences_and_a_static_tail(causal) -> None:
    shape = PackShape(((0, 0), (40, 40), (0, 0)), 2, 2, 64, causal, tails=(24, 24))
    pack = pack_on_device(shape)
    assert_bits_of_dense(pack, pack.gradients())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tails", [(0, 0), (1, 300), (300, 1)])
@pytest.mark.parametrize("gaps", [(0, 0), (1, 1), (70, 0), (0, 130)])
def test_rows_of_no_sequence_are_zeros(gaps, tails, causal) -> None:
    shape = PackShape(LENGTHS["unequal"], 4, 2, 128, causal, gaps=gaps, tails=tails)
    pack = pack_on_device(shape)
    for value in (torch.nan, torch.inf):
        poison_rows_of_none(pack, value)
        assert_bits_of_dense(pack, pack.gradients())


def test_accuracy_against_fp64() -> None:
    lengths = ((333, 333), (0, 4), (150, 97), (1, 1), (64, 200))
    for causal, head_dim in itertools.product((False, True), (64, 128)):
        shape = PackShape(lengths, 4, 2, head_dim, causal, tails=(5, 6))
        on_cpu = attended_pack(shape)
        tensors = {name: t.to(DEVICE) for name, t in on_cpu.tensors.items()}
        pack = Pack(shape, tensors, length_tensors(shape, DEVICE))
        grads = tuple(t.cpu().double() for t in pack.gradients())
        for index, got in enumerate(pack.sequences_of(grads)):
            if 0 not in lengths[index] and lengths[index] != (1, 1):
                for x, wanted in zip(got, fp64_gradients(on_cpu, index), strict=True):
                    assert (x - wanted).norm() / wanted.norm() < 8e-3


# ---- Sizes ---------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("length", [1, 2])
def test_65536_sequences(length) -> None:
    """As the dense batch of them."""
    count = 2**16
    shape = PackShape(((length, length),) * count, 2, 1, 64, causal=True)
    pack = pack_on_device(shape)
    dense = {
        n: t.unflatten(0, (count, length)) for n, t in pack.tensors.items() if n != "softmax_lse"
    }
    lse = pack.tensors["softmax_lse"].unflatten(1, (count, length)).transpose(0, 1)
    wanted = torch.ops.dash.attention_bwd(*dense.values(), lse, None, True)
    assert all(same_bits(x, y.flatten(0, 1)) for x, y in zip(pack.gradients(), wanted, strict=True))


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_more_elements_than_an_int_counts(causal) -> None:
    """552,000 rows of 32 heads of 128: 2.26e9 elements a tensor; about 50 GB, a few seconds."""
    shape = PackShape(((1000, 1000),) * 552, 32, 32, 128, causal)
    assert shape.total(0) * 32 * 128 > 2**31
    pack = pack_on_device(shape)
    grads = list(pack.sequences_of(pack.gradients()))
    for index in (0, 523, 524, 525, 551):  # 2**31 elements are 524,288 rows
        assert all_same(grads[index], pack.dense(index)), index


# ---- Windows, and a gradient of lse --------------------------------------------------------------

WINDOWS = ((0, 0), (0, None), (1, 0), (64, 64), (127, None), (None, 3), (300, 0), (1000, 1000))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize("lengths", ["ragged", "unequal"])
def test_windows_have_the_bits_of_the_dense_call(lengths, left, right, causal, head_dim) -> None:
    shape = PackShape(LENGTHS[lengths], 4, 2, head_dim, causal, left, right, tails=(9, 9))
    pack = pack_on_device(shape)
    for strategy in strategies_of(shape):
        assert_bits_of_dense(pack, pack.gradients(strategy), strategy)


def test_case_32_a_window_is_normalised_in_each_sequence() -> None:
    shape = PackShape(((100, 100), (5000, 5000), (100, 100)), 2, 2, 128, True, window_left=1024)
    pack = pack_on_device(shape)
    grads = pack.gradients()
    assert_bits_of_dense(pack, grads)
    pack.shape = replace(shape, window_left=None)
    short, long, last = pack.sequences_of(grads)
    assert all_same(short, pack.dense(0))
    assert all_same(last, pack.dense(2))
    assert not all_same(long, pack.dense(1))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_of_lse_has_the_bits_of_the_dense_call(causal, head_dim) -> None:
    """NaN in rows of no sequence; heads behind rows in memory."""
    shape = PackShape(LENGTHS["unequal"], 4, 2, head_dim, causal, gaps=(3, 2), tails=(9, 9))
    pack = pack_on_device(shape)
    dlse = torch.randn(shape.total(0), 4, device=DEVICE).T
    dlse[:, pack.rows_of_none(0)] = torch.nan
    grads = pack.gradients(dlse=dlse)
    for index, got in enumerate(pack.sequences_of(grads)):
        if 0 not in shape.lengths[index]:
            own = dlse[:, pack.rows(index, 0)][None]
            wanted = torch.ops.dash.attention_bwd(
                *pack.alone(index).values(), dlse=own, **shape.mask
            )
            assert all_same(got, [g[0] for g in wanted])
    for grad, side in zip(grads, (0, 1, 1), strict=True):
        assert not grad[pack.rows_of_none(side)].view(torch.int16).any()
