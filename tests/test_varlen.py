"""Packed sequences on the CPU: the bits of the dense call, whatever lies around a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_cases import fp64_gradients, pack_shapes, strategies_of
from packs import (
    PackShape,
    all_same,
    assert_bits_of_dense,
    attended_pack,
    poison_rows_of_none,
    random_pack,
    same_bits,
    with_order,
)

import dash
from dash import _C

# ---- Bits of the dense call ----------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(pack_shapes(), st.data())
def test_every_sequence_has_the_bits_of_its_dense_call(shape: PackShape, data) -> None:
    group = shape.heads // shape.kv_heads
    split = data.draw(st.sampled_from([0, *(n for n in range(1, group + 1) if group % n == 0)]))
    strategy = data.draw(st.sampled_from(strategies_of(shape)))
    pack = random_pack(shape, seed=data.draw(st.integers(0, 9)))
    assert_bits_of_dense(pack, pack.gradients(strategy, split), strategy, split)


@settings(max_examples=12, deadline=None)
@given(pack_shapes(max_sequences=4), st.randoms(use_true_random=False))
def test_order_and_neighbours_change_no_bit(shape: PackShape, random) -> None:
    pack = random_pack(shape)
    before = list(pack.sequences_of(pack.gradients()))
    order = list(range(len(shape.lengths)))
    random.shuffle(order)
    order = order[: random.randint(0, len(order))]
    moved = with_order(pack, order)
    for place, grads in enumerate(moved.sequences_of(moved.gradients())):
        assert all(map(same_bits, grads, before[order[place]]))


def test_a_neighbour_of_nan_and_infinity_changes_no_bit() -> None:
    pack = random_pack(PackShape(((70, 70), (130, 130), (1, 1), (64, 64)), 4, 2, causal=True))
    before = list(pack.sequences_of(pack.gradients()))
    for name, t in pack.tensors.items():
        rows = pack.rows(1, 1 if name in "kv" else 0)
        (t[:, rows] if name == "softmax_lse" else t[rows])[..., ::2] = torch.nan
        (t[:, rows] if name == "softmax_lse" else t[rows])[..., 1::2] = torch.inf
    after = list(pack.sequences_of(pack.gradients()))
    for index in (0, 2, 3):
        assert all(map(same_bits, after[index], before[index])), index
        assert all(t.isfinite().all() for t in after[index])


@pytest.mark.parametrize("causal", [False, True])
def test_one_sequence_is_the_dense_call(causal) -> None:
    pack = random_pack(PackShape(((300, 300),), 4, 2, 128, causal))
    assert_bits_of_dense(pack, pack.gradients())


@pytest.mark.parametrize("causal", [False, True])
def test_case_31_empty_sequences_and_a_static_tail(causal) -> None:
    """64 rows, cu_seqlens 0, 0, 40, 40; rows 40 … 63 hold NaN."""
    shape = PackShape(((0, 0), (40, 40), (0, 0)), 2, 2, 64, causal, tails=(24, 24))
    pack = random_pack(shape)
    assert pack.lengths["cu_seqlens_q"].tolist() == [0, 0, 40, 40]
    assert pack.tensors["q"][40:].isnan().all()
    grads = pack.gradients()
    assert_bits_of_dense(pack, grads)
    assert all(t[:40].any() and not t[40:].view(torch.int16).any() for t in grads)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.0])
def test_rows_between_sequences_are_zeros_whatever_they_hold(value) -> None:
    shape = PackShape(((30, 50), (64, 1), (5, 5)), causal=True, gaps=(7, 9), tails=(3, 0))
    pack = random_pack(shape)
    poison_rows_of_none(pack, value)
    assert_bits_of_dense(pack, pack.gradients())


@pytest.mark.parametrize("empty", ["no rows of q", "no rows of k", "no sequences", "all empty"])
def test_empty_packs(empty) -> None:
    lengths = {"no rows of q": ((0, 9), (0, 30)), "no rows of k": ((9, 0), (30, 0))}
    shape = PackShape(lengths.get(empty, ()), tails=(0, 0) if empty in lengths else (20, 30))
    if empty == "all empty":
        shape = replace(shape, lengths=((0, 0), (0, 0), (0, 0)))
    pack = random_pack(shape)
    grads = pack.gradients()
    for grad, name in zip(grads, "qkv", strict=True):
        assert grad.shape == pack.tensors[name].shape
        assert not grad.any()


def test_65536_sequences() -> None:
    """Most of them empty, so that the CPU is done in seconds; the GPU's test has none empty."""
    lengths = [(0, 0)] * 2**16
    for index in range(0, 2**16, 100):
        lengths[index] = (1, 1)
    pack = random_pack(PackShape(tuple(lengths), 1, 1, 16, causal=True))
    q, k, lse = (pack.tensors[name].float() for name in ("q", "k", "softmax_lse"))
    p = torch.exp((q * k).sum(-1) / 4 - lse.T).to(pack.shape.dtype)
    wanted = p.float()[..., None] * pack.tensors["dout"].float()
    assert wanted.shape == (656, 1, 16)
    torch.testing.assert_close(pack.gradients()[2].float(), wanted, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("bound", [None, 1, 10**6, torch.tensor(7)])
def test_max_seqlen_changes_nothing(bound) -> None:
    pack = random_pack(PackShape(((70, 70), (130, 90)), causal=True))
    before = pack.gradients()
    after = pack.gradients(max_seqlen_q=bound, max_seqlen_k=bound)
    assert all(map(same_bits, before, after))


def test_max_seqlen_on_a_device_is_never_read() -> None:
    """A 0-d tensor whose reading raises stands for one whose reading waits for the GPU."""
    pack = random_pack(PackShape(((70, 70),)))
    unreadable = torch.tensor(70, device="meta")
    call = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), unreadable)
    inputs = {name: t.to("meta") for name, t in pack.tensors.items()}
    cu = dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(2, dtype=torch.int32).to("meta")
    )
    dq, dk, _ = torch.ops.dash.attention_varlen_bwd(*inputs.values(), **cu, **call)
    assert dq.shape == dk.shape == (70, 2, 64)


# ---- Windows -------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(pack_shapes(windows=True), st.data())
def test_windows_have_the_bits_of_the_dense_call(shape: PackShape, data) -> None:
    pack = random_pack(shape)
    strategy = data.draw(st.sampled_from(strategies_of(shape)))
    assert_bits_of_dense(pack, pack.gradients(strategy), strategy)


def test_case_32_a_window_is_normalised_in_each_sequence() -> None:
    """Lengths 100, 5,000, 100, window_left 1,024: the short ones are as without a window."""
    shape = PackShape(((100, 100), (5000, 5000), (100, 100)), 1, 1, 16, True, window_left=1024)
    pack = random_pack(shape)
    grads = pack.gradients()
    assert_bits_of_dense(pack, grads)
    pack.shape = replace(shape, window_left=None)
    for index in (0, 2):
        assert all_same(list(pack.sequences_of(grads))[index], pack.dense(index))
    assert not all_same(list(pack.sequences_of(grads))[1], pack.dense(1))


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, None), (64, 64), (5, 0), (None, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_match_fp64(left, right, causal) -> None:
    lengths = ((33, 33), (150, 97), (1, 1), (64, 200))
    pack = attended_pack(PackShape(lengths, 2, 1, 64, causal, left, right, tails=(5, 6)))
    wanted = [torch.zeros(pack.tensors[n].shape, dtype=torch.float64) for n in "qkv"]
    for index, sequence in enumerate(pack.sequences_of(tuple(wanted))):
        for target, grad in zip(sequence, fp64_gradients(pack, index), strict=True):
            target.copy_(grad)
    for name, got, reference in zip("qkv", pack.gradients(), wanted, strict=True):
        error = (got.double() - reference).norm()
        assert error <= 8e-3 * reference.norm() + 1e-6, f"d{name}: {error}"


# ---- Accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_gradients_match_fp64(heads, kv_heads, causal) -> None:
    lengths = ((33, 33), (0, 4), (150, 97), (1, 1), (64, 200))
    pack = attended_pack(PackShape(lengths, heads, kv_heads, 64, causal, tails=(5, 6)))
    wanted = [torch.zeros(pack.tensors[n].shape, dtype=torch.float64) for n in "qkv"]
    for index, sequence in enumerate(pack.sequences_of(tuple(wanted))):
        if 0 not in lengths[index]:
            for target, grad in zip(sequence, fp64_gradients(pack, index), strict=True):
                target.copy_(grad)
    for name, got, reference in zip("qkv", pack.gradients(), wanted, strict=True):
        error = (got.double() - reference).norm() / reference.norm()
        assert error < 8e-3, f"d{name}: {error}"


# ---- attention_varlen ----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_varlen_has_the_bits_of_attention(causal) -> None:
    """out, lse and gradients, of a call through autograd."""
    shape = PackShape(((70, 70), (0, 3), (129, 200)), 4, 2, 64, causal, gaps=(3, 2), tails=(9, 1))
    pack = random_pack(shape)
    leaves = [pack.tensors[name].clone().requires_grad_() for name in "qkv"]
    dout = pack.tensors["dout"].nan_to_num()
    out, lse = dash.attention_varlen(*leaves, causal=causal, return_lse=True, **pack.lengths)
    assert lse.shape == (4, shape.total(0))
    assert lse.dtype == torch.float32
    grads = torch.autograd.grad(out, leaves, dout)
    assert not out[pack.rows_of_none(0)].any()
    assert lse[:, pack.rows_of_none(0)].isinf().all()
    for index in (0, 2):
        one = pack.alone(index)
        alone = [one[name].requires_grad_() for name in "qkv"]
        wanted, wanted_lse = dash.attention(*alone, causal=causal, return_lse=True)
        assert same_bits(out[pack.rows(index, 0)], wanted[0])
        assert torch.equal(lse[:, pack.rows(index, 0)], wanted_lse[0])
        wanted_grads = torch.autograd.grad(wanted, alone, one["dout"])
        for got, grad in zip(list(pack.sequences_of(grads))[index], wanted_grads, strict=True):
            assert same_bits(got, grad[0])


def test_cu_seqlens_k_is_that_of_q_where_there_is_none() -> None:
    pack = random_pack(PackShape(((70, 70), (20, 20))))
    q, k, v = (pack.tensors[name] for name in "qkv")
    cu = pack.lengths["cu_seqlens_q"]
    assert same_bits(
        dash.attention_varlen(q, k, v, cu), dash.attention_varlen(q, k, v, cu, cu.clone())
    )


def test_second_derivatives_are_a_clear_error() -> None:
    pack = random_pack(PackShape(((20, 20),)))
    q, k, v = (pack.tensors[name].requires_grad_() for name in "qkv")
    out = dash.attention_varlen(q, k, v, pack.lengths["cu_seqlens_q"])
    dq = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="attention_varlen_bwd has no derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("strategy", _C.strategies())
def test_attention_varlen_takes_an_order(strategy) -> None:
    shape = PackShape(((130, 130), (64, 64)), 4, 2, causal=strategy != "shift")
    pack = random_pack(shape)
    q, k, v = (pack.tensors[name].clone().requires_grad_() for name in "qkv")
    rest = {"causal": shape.causal, "strategy": strategy, "group_split": 2}
    if strategy == "symmetric_shift":
        with pytest.raises(dash.UnsupportedError, match="depends on each length"):
            dash.attention_varlen(q, k, v, pack.lengths["cu_seqlens_q"], **rest)
        return
    out, lse = dash.attention_varlen(q, k, v, pack.lengths["cu_seqlens_q"], return_lse=True, **rest)
    grads = torch.autograd.grad(out, (q, k, v), pack.tensors["dout"])
    pack.tensors |= {"out": out.detach(), "softmax_lse": lse}
    assert_bits_of_dense(pack, grads, strategy, 2)
