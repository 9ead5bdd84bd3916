"""The kernels where v has another head dimension than q and k, and beyond 128: on the GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from accuracy import assert_accurate, judged_inputs, visible
from gpu_conditions import DifferentCalls, OtherStream, all_inside, poison_allocator
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    DEVICE,
    ON_GPU,
    Inputs,
    Shape,
    bits,
    gradients,
    make_problem,
    needs_gpu,
    random_inputs,
    same_bits,
    skip_if_refused,
    with_strategies,
)
from kernel_call import backward_into
from mla_layer import train
from pack_cases import LENGTHS, pack_on_device, strategies_of
from packs import PackShape, assert_bits_of_dense

import dash
from dash import forward

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
MASKS = (False, True)
REPEATS = 1000 if ON_GPU else 2

# Both edges of the bucket of q and k, v from its smallest to its largest; v beyond q and k.
DIMS = ((136, 64), (136, 128), (192, 72), (192, 128), (64, 128), (128, 64), (48, 40))
LAYOUTS = (
    (2, 4, 4, 256, 256),  # whole tiles
    (1, 6, 2, 384, 640),  # GQA, more keys than queries
    (1, 4, 1, 640, 384),  # MQA; with the causal mask, rows without keys
    (3, 2, 2, 113, 203),  # ragged
)


def shape_of(layout: tuple[int, ...], dims: tuple[int, int], causal: bool, **more: object) -> Shape:
    return Shape(*layout, dims[0], causal, head_dim_v=dims[1], **more)


GRID = [
    shape_of(layout, dims, causal, dtype=dtype)
    for layout, dims, causal, dtype in itertools.product(LAYOUTS, DIMS, MASKS, (BF16, FP16))
]
OTHERS = [
    *(shape_of((1, 2, 1, n, n), (192, 128), causal) for n in (1, 65, 4096) for causal in MASKS),
    *(
        shape_of((2, 4, 2, 200, 333), (192, 128), causal, scale=scale)
        for causal, scale in itertools.product(MASKS, (0.3, -0.1, 0.0, 1e-3))
    ),
]
BITS = [
    shape_of((2, 6, 2, seqlen_q, seqlen_k), dims, causal)
    for (seqlen_q, seqlen_k), dims, causal in itertools.product(
        ((1000, 1000), (700, 1300)), ((192, 128), (136, 72)), MASKS
    )
]


# ---- Accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(GRID + OTHERS))
def test_gradients_are_accurate(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    inputs, reference, plain = judged_inputs(shape)
    got = gradients(inputs, strategy)
    assert_accurate(got, reference, plain, f"{shape} {strategy}")
    if shape.scale == 0.0:
        assert not got[0].any()
        assert not got[1].any()


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("parts", [2, 4])
def test_split_groups_are_accurate(parts: int, causal: bool) -> None:
    inputs, reference, plain = judged_inputs(shape_of((2, 8, 2, 300, 700), (192, 128), causal))
    assert_accurate(gradients(inputs, "auto", parts), reference, plain)


@pytest.mark.parametrize("dims", [(192, 128), (136, 64)])
def test_rows_without_keys_and_overflow(dims: tuple[int, int]) -> None:
    """Whatever rows without keys hold; and lse so small that exp(−lse) of a tail overflows."""
    shape = shape_of((1, 2, 1, 300, 200), dims, True)
    inputs, reference, plain = judged_inputs(shape)
    poisoned = [t.clone() for t in inputs.tensors()]
    for tensor in (poisoned[0], poisoned[1], poisoned[4]):
        tensor[:, :100] = torch.nan
    poisoned[5][..., :100] = torch.nan
    got = gradients(dataclasses.replace(inputs, **dict(zip(
        ("dout", "q", "k", "v", "out", "lse"), poisoned, strict=True))))  # fmt: skip
    assert same_bits(got, gradients(inputs))
    assert not got[0][:, :100].any()
    assert_accurate(got, reference, plain)


# ---- Bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(BITS))
def test_repeats_beside_a_busy_stream(shape: Shape, strategy: str) -> None:
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    different = DifferentCalls(gradients(inputs, strategy))
    load = OtherStream() if ON_GPU else None
    for _ in range(REPEATS):
        if load is not None:
            load.enqueue()
        different.add(gradients(inputs, strategy))
    assert different.count() == 0, f"{different.count()} tensors of {REPEATS} calls differ"


@pytest.mark.parametrize("shape", BITS, ids=str)
def test_poisoned_memory_changes_no_bit(shape: Shape) -> None:
    inputs = random_inputs(shape)
    wanted = gradients(inputs)
    ranges = poison_allocator(0xFF)
    got = gradients(inputs)
    assert not ON_GPU or all_inside(got, ranges), "the outputs' memory was not poisoned"
    assert same_bits(got, wanted)


@needs_gpu
@pytest.mark.parametrize("shape", BITS, ids=str)
def test_the_grid_changes_no_bit(shape: Shape) -> None:
    """And nothing is written outside the outputs: they lie in NaN."""
    inputs = random_inputs(shape)
    wanted = gradients(inputs, "ascending")
    for ctas in (1, 7, None):
        stores = [
            torch.full((s[0], s[1] + 2, s[2] + 1, s[3] + 8), torch.nan, dtype=BF16, device=DEVICE)
            for s in (shape.q_shape, shape.kv_shape, shape.v_shape)
        ]
        grads = tuple(t[:, 1:-1, :-1, :-8] for t in stores)
        backward_into(grads, shape, inputs, "ascending", ctas)
        assert same_bits((g.contiguous() for g in grads), wanted)
        for store, grad in zip(stores, grads, strict=True):
            grad.fill_(torch.nan)
            assert store.isnan().all()


@pytest.mark.parametrize("causal", MASKS)
def test_a_sequence_has_its_bits_in_every_batch(causal: bool) -> None:
    inputs = random_inputs(shape_of((4, 6, 2, 300, 420), (192, 128), causal))
    together = gradients(inputs)
    for index in range(4):
        alone = gradients(inputs.sequences(index))
        assert same_bits((t[index : index + 1] for t in together), alone)


@needs_gpu
def test_graph_replays() -> None:
    shape = BITS[1]
    variants = [random_inputs(shape, seed) for seed in range(3)]
    wanted = [gradients(inputs) for inputs in variants]
    static = Inputs(*(t.clone() for t in variants[0].tensors()), causal=shape.causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(static)
    for seed in (0, 1, 2, 2):
        for target, source in zip(static.tensors(), variants[seed].tensors(), strict=True):
            target.copy_(source)
        graph.replay()
        assert same_bits(got, wanted[seed])


@pytest.mark.parametrize("window", [{}, {"window_left": 100}, {"window_left": 70}])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("dims", [(192, 128), (136, 72), (64, 128)])
@pytest.mark.parametrize("lengths", ["ragged", "unequal"])
def test_a_pack_has_the_bits_of_dense_calls(lengths, dims, causal, window) -> None:
    shape = PackShape(
        LENGTHS[lengths], 4, 2, dims[0], causal, gaps=(3, 2), tails=(9, 1), head_dim_v=dims[1],
        **window,
    )  # fmt: skip
    pack = pack_on_device(shape)
    for strategy in strategies_of(shape):
        assert_bits_of_dense(pack, pack.gradients(strategy), strategy)
    assert_bits_of_dense(pack, pack.gradients("auto", 2), "auto", 2)


# ---- Forwards and layers -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:dash.attention. flash_attn_interface refused")
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("dims", DIMS)
def test_every_forward_that_says_it_can_is_right(dims: tuple[int, int], causal: bool) -> None:
    inputs = random_inputs(shape_of((2, 4, 2, 256, 256), dims, causal))
    call = forward.ForwardCall(inputs.q, inputs.k, inputs.v, dims[0] ** -0.5, causal)
    out, lse = forward.plain_forward(*call[:5])
    for name, refusal in forward._REFUSALS.items():
        if refusal(call) is not None:
            continue
        try:
            got, got_lse = forward.run_forward(call, name)
        except dash.UnsupportedError:  # a build of FlashAttention-3 without this kernel
            assert name == "fa3"
            continue
        assert got.is_contiguous()
        assert (got - out).abs().max() < 2e-2, name
        assert (got_lse - lse).abs().max() < 2e-3, name


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("dims", [(192, 128), (136, 64), (64, 128)])
def test_autograd_reaches_accurate_gradients(dims: tuple[int, int], causal: bool) -> None:
    shape = shape_of((2, 4, 2, 256, 256), dims, causal)
    inputs, reference, plain = judged_inputs(shape)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = dash.attention(*leaves, causal=causal)
    assert_accurate(torch.autograd.grad(out, leaves, inputs.dout), reference, plain)
    packed = [t.detach().flatten(0, 1).requires_grad_() for t in leaves]
    cu_seqlens = torch.tensor([0, 256, 512], dtype=torch.int32, device=DEVICE)
    out = dash.attention_varlen(*packed, cu_seqlens, max_seqlen_q=256, max_seqlen_k=256,
                                causal=causal)  # fmt: skip
    got = torch.autograd.grad(out, packed, inputs.dout.flatten(0, 1))
    assert_accurate([g.unflatten(0, (2, 256)) for g in got], reference, plain)


@pytest.mark.parametrize("dims", [(192, 128), (136, 64), (64, 128)])
def test_a_gradient_through_lse_and_a_sink(dims: tuple[int, int]) -> None:
    """Against fp64: a sink is one more score, which has no key."""
    shape = shape_of((1, 2, 2, 130, 200), dims, True)
    inputs = random_inputs(shape)
    sink = torch.tensor([0.5, -1.0], device=DEVICE)
    dlse = random_inputs(shape, 1).lse
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v, sink)]
    out, lse = dash.attention(*leaves[:3], causal=True, sink=leaves[3], return_lse=True)
    got = torch.autograd.grad((out, lse), leaves, (inputs.dout, dlse))

    exact = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v = (t.transpose(1, 2) for t in exact[:3])
    scores = (q @ k.mT * dims[0] ** -0.5).masked_fill(~visible(130, 200, True), -torch.inf)
    logits = torch.cat([scores, exact[3][None, :, None, None].expand(1, 2, 130, 1)], -1)
    wide, wide_lse = logits.softmax(-1)[..., :-1] @ v, logits.logsumexp(-1)
    wanted = torch.autograd.grad(
        (wide.transpose(1, 2), wide_lse), exact, (inputs.dout.double(), dlse.double())
    )
    for name, x, reference in zip(("dq", "dk", "dv", "dsink"), got, wanted, strict=True):
        error = (x.double() - reference).norm() / reference.norm()
        assert error < 1e-2, f"{name}: {error:.3g}"


def test_multi_head_latent_attention_trains_alike_twice() -> None:
    """K decompressed from a latent, rotary columns shared by the heads, 50 steps."""
    steps = 50 if ON_GPU else 3
    first, losses = train(DEVICE, steps)
    again, _ = train(DEVICE, steps)
    assert losses[-1] < losses[0]
    for name, weight in first.items():
        assert torch.equal(bits(weight), bits(again[name])), name


def test_the_kernel_is_asked_with_tiles_of_its_bucket() -> None:
    problem = make_problem(shape_of((1, 2, 1, 300, 300), (192, 128), True))
    assert (problem.tile_q, problem.tile_kv) == (64, 128)
