"""Packed calls as a GPU sees them: streams, graphs, memory, and cu_seqlens that hold anything."""

from __future__ import annotations

import pytest
import torch
from gpu_conditions import all_inside, poison_allocator
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import DEVICE, ON_GPU, needs_gpu
from pack_cases import LENGTHS, pack_on_device
from packs import Gradients, Pack, PackShape, all_same, assert_bits_of_dense, same_bits

import dash
from dash import _C

pytestmark = pytest.mark.gpu


# ---- What a GPU does to a call -------------------------------------------------------------------


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    pack = pack_on_device(PackShape(LENGTHS["ragged"], 4, 2, causal=True, gaps=(3, 3)))
    bound = torch.tensor(1000, device=DEVICE)
    wanted = pack.gradients()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = pack.gradients(max_seqlen_q=bound, max_seqlen_k=bound)
        more = pack.gradients(max_seqlen_q=1000, max_seqlen_k=1000)
        q, k, v = (pack.tensors[name].nan_to_num().requires_grad_() for name in "qkv")
        out = dash.attention_varlen(
            q, k, v, causal=True, max_seqlen_q=bound, max_seqlen_k=bound, **pack.lengths
        )
        torch.autograd.grad(out, (q, k, v), out.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all_same(got, wanted)
    assert all_same(more, wanted)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_is_replayed_with_other_lengths(causal) -> None:
    """The same totals and number of sequences, six other sets of lengths."""
    total = 2000
    chosen = (
        ((500, 500),) * 4,
        ((2000, 2000), (0, 0), (0, 0), (0, 0)),
        ((1, 1), (777, 777), (0, 0), (222, 222)),
        ((64, 128), (128, 64), (1, 900), (900, 1)),
        ((0, 0),) * 4,
        ((1999, 1), (0, 1), (0, 1), (1, 1997)),
        ((500, 500),) * 4,
    )
    shapes = [
        PackShape(
            lengths,
            4,
            2,
            128,
            causal,
            tails=tuple(total - sum(s) for s in zip(*lengths, strict=True)),
        )
        for lengths in chosen
    ]
    variants = [pack_on_device(shape, seed) for seed, shape in enumerate(shapes)]
    static = Pack(
        shapes[0],
        {name: t.clone() for name, t in variants[0].tensors.items()},
        {name: t.clone() for name, t in variants[0].lengths.items()},
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = static.gradients()
    for variant in variants:
        for name, t in (variant.tensors | variant.lengths).items():
            (static.tensors | static.lengths)[name].copy_(t)
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        assert_bits_of_dense(variant, got)


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize("causal", [False, True])
def test_poisoned_memory(byte, causal) -> None:
    """Outputs, sums, counters and the sequence table start as ``byte``."""
    pack = pack_on_device(
        PackShape(LENGTHS["unequal"], 8, 1, 128, causal, gaps=(9, 9), tails=(9, 9))
    )
    wanted = pack.gradients()
    ranges = poison_allocator(byte)
    got = pack.gradients()
    assert not ON_GPU or all_inside(got, ranges), "the outputs' memory was not poisoned"
    assert all_same(got, wanted)
    assert_bits_of_dense(pack, got)


@needs_gpu
def test_the_determinism_switch_changes_no_bit() -> None:
    pack = pack_on_device(PackShape(LENGTHS["ragged"], 4, 2, 128, True, gaps=(2, 2), tails=(3, 3)))
    wanted = pack.gradients()
    torch.use_deterministic_algorithms(True)
    try:
        got = pack.gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all_same(got, wanted)


@needs_gpu
def test_two_packs_at_once_share_nothing() -> None:
    shapes = (
        PackShape(LENGTHS["ragged"], 4, 2, 128, True),
        PackShape(LENGTHS["one long"], 4, 2, 128),
    )
    pair = [pack_on_device(shape, seed) for seed, shape in enumerate(shapes)]
    wanted = [pack.gradients() for pack in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    torch.cuda.synchronize()
    got: list[list[Gradients]] = [[], []]
    for _ in range(20):
        for stream, pack, calls in zip(streams, pair, got, strict=True):
            with torch.cuda.stream(stream):
                calls.append(pack.gradients())
    torch.cuda.synchronize()
    for calls, want in zip(got, wanted, strict=True):
        assert all(all_same(grads, want) for grads in calls)


# ---- cu_seqlens that describe no pack ------------------------------------------------------------

LARGE, SMALL = 2**31 - 1, -(2**31)
GARBAGE = [
    (0, 300, 100, 600), (5, 100, 200, 600), (0, 200, 400, 601), (0, 200, 400, LARGE),
    (SMALL, 0, 1, 600), (0, LARGE, SMALL, 600), (-1, -2, -3, -4), (LARGE,) * 4, (600, 400, 200, 0),
]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("side", ["q", "k", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_garbage_gives_nan_and_no_access_outside(garbage, side, causal) -> None:
    """Guards around the outputs stay; sanitized_calls.py looks for reads outside."""
    pack = pack_on_device(PackShape(((200, 200),) * 3, 4, 2, 128, causal))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if side in (name[-1], "both"):
            pack.lengths[name] = torch.tensor(garbage, dtype=torch.int32, device=DEVICE)
    guarded = [guarded_like(pack.tensors[name]) for name in "qkv"]
    backward_into(pack, [inner for _, inner in guarded])
    torch.cuda.synchronize()
    for buffer, inner in guarded:
        rows = inner.shape[0]
        assert inner.isnan().all()
        assert (buffer[:rows] == 7).all()
        assert (buffer[2 * rows :] == 7).all()


@needs_gpu
@pytest.mark.parametrize("used", [(201, 0, 0), (-1, 5, 5), (LARGE, SMALL, 200)], ids=str)
@pytest.mark.parametrize("side", ["q", "k"])
def test_wrong_seqused_gives_nan(used, side) -> None:
    pack = pack_on_device(PackShape(((200, 200),) * 3, 4, 2, 128, causal=True))
    pack.lengths[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    assert all(grad.isnan().all() for grad in pack.gradients())


@needs_gpu
def test_a_call_after_garbage_is_right() -> None:
    pack = pack_on_device(PackShape(((200, 200),) * 3, 4, 2, 128, causal=True))
    right = pack.lengths["cu_seqlens_q"].clone()
    pack.lengths["cu_seqlens_q"].copy_(torch.tensor(GARBAGE[0], dtype=torch.int32))
    pack.gradients()
    pack.lengths["cu_seqlens_q"].copy_(right)
    assert_bits_of_dense(pack, pack.gradients())


def guarded_like(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of 7s three times as long as ``t``, and its middle."""
    rows = t.shape[0]
    buffer = torch.full((3 * rows, *t.shape[1:]), 7, dtype=t.dtype, device=t.device)
    return buffer, buffer[rows : 2 * rows]


def backward_into(pack: Pack, grads: list[torch.Tensor]) -> None:
    """The binding itself, into tensors of the caller. Workspace: 0xFF bytes."""
    shape, tensors = pack.shape, pack.tensors
    about = {
        "batch": len(shape.lengths), "heads": shape.heads, "kv_heads": shape.kv_heads,
        "total_q": shape.total(0), "total_k": shape.total(1), "head_dim": shape.head_dim,
        "causal": shape.causal,
    }  # fmt: skip
    size = _C.varlen_workspace_bytes(**about)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    views = {name: tensors[name] for name in ("dout", "q", "k", "v", "out")}
    views |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    lse = tensors["softmax_lse"]
    _C.backward_varlen(
        **about, **{name: (t.data_ptr(), *t.stride()[:2]) for name, t in views.items()},
        **{name: t.data_ptr() for name, t in pack.lengths.items()},
        **{name: 0 for name in ("seqused_q", "seqused_k") if name not in pack.lengths},
        lse=(lse.data_ptr(), *lse.stride()), dtype="bfloat16",
        softmax_scale=shape.head_dim**-0.5, workspace=workspace.data_ptr(), workspace_bytes=size,
        device=torch.cuda.current_device(), stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip


# ---- attention_varlen ----------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("forward", ["fa3", "flash", "plain"])
@pytest.mark.parametrize("gaps", [(0, 0), (5, 3)])
@pytest.mark.parametrize(("causal", "left"), [(False, None), (True, None), (True, 60), (False, 60)])
def test_forwards_agree(forward, gaps, causal, left) -> None:
    shape = PackShape(LENGTHS["unequal"], 4, 2, 128, causal, left, gaps=gaps, tails=(40, 7))
    pack = pack_on_device(shape)
    arguments = [pack.tensors[name] for name in "qkv"]
    more = {"return_lse": True, **pack.lengths, **shape.mask}
    try:
        out, lse = dash.attention_varlen(*arguments, forward=forward, **more)
    except dash.UnsupportedError as refusal:
        pytest.skip(str(refusal))
    wanted, wanted_lse = (
        t.to(DEVICE)
        for t in dash.attention_varlen(
            *(t.cpu() for t in arguments),
            **{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in more.items()},
        )
    )
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    keyless = wanted_lse.isinf()
    assert torch.equal(lse.isinf(), keyless)
    torch.testing.assert_close(lse[~keyless], wanted_lse[~keyless], rtol=1e-3, atol=1e-3)


@needs_gpu
def test_the_forwards_bound_changes_no_bit() -> None:
    pack = pack_on_device(PackShape(LENGTHS["ragged"], 4, 2, 128, True))
    q, k, v = (pack.tensors[name] for name in "qkv")
    few = dash.attention_varlen(
        q, k, v, causal=True, max_seqlen_q=1000, max_seqlen_k=1000, **pack.lengths
    )
    none = dash.attention_varlen(q, k, v, causal=True, **pack.lengths)
    assert same_bits(few, none)


@needs_gpu
@pytest.mark.parametrize("forward", ["fa3", "flash"])
@pytest.mark.parametrize("lengths", [((1, 300),) * 5, ((1, 70), (0, 5), (1, 1))], ids=str)
def test_sequences_of_one_query(forward, lengths) -> None:
    """Kernels of others have a path of their own for max_seqlen_q = 1 and GQA."""
    pack = pack_on_device(PackShape(lengths, 8, 2, 128, True, tails=(3, 0)))
    arguments = [pack.tensors[name] for name in "qkv"]
    more = {"causal": True, "return_lse": True, **pack.lengths}
    try:
        out, lse = dash.attention_varlen(*arguments, forward=forward, max_seqlen_q=1, **more)
    except dash.UnsupportedError as refusal:
        pytest.skip(str(refusal))
    wanted, wanted_lse = dash.attention_varlen(*arguments, forward="plain", **more)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    seen = ~wanted_lse.isinf()
    torch.testing.assert_close(lse[seen], wanted_lse[seen], rtol=1e-3, atol=1e-3)
