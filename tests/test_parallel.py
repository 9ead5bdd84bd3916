"""DTensor, FSDP2, tensor parallelism and activation checkpointing around dash, in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from op_calls import randn
from process_groups import fake_group, gloo_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import dash
from dash import interface
from dash.compat import dtensor

RANKS = 2
BOUNDS = torch.tensor([0, 40, 41, 96], dtype=torch.int32)
STRATEGY = {"strategy": "ascending"}  # auto may choose by the number of heads, which sharding cuts


@pytest.fixture(autouse=True, scope="module")
def _rules() -> None:
    dtensor.register()
    dtensor.register()  # a second call changes nothing


# ---- Sharding rules ------------------------------------------------------------------------------


def tensors(packed: bool, kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v, dout."""
    lead = (96,) if packed else (2, 96)
    return [randn(*lead, h, 64, seed=i) for i, h in enumerate((4, kv_heads, kv_heads, 4))]


def run(packed: bool, q, k, v, dout, bounds: torch.Tensor = BOUNDS) -> list[torch.Tensor]:
    """out, lse and gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    if packed:
        out, lse = dash.attention_varlen(*leaves, bounds, causal=True, return_lse=True, **STRATEGY)
    else:
        out, lse = dash.attention(*leaves, causal=True, return_lse=True, **STRATEGY)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize(
    ("packed", "placement"),
    [(False, Shard(0)), (False, Shard(2)), (True, Shard(1))],
    ids=["batch", "heads", "packed heads"],
)
def test_shards_give_the_bits_of_the_whole(packed, placement) -> None:
    """Each rank computes its part alone; the parts are those of the call without sharding."""
    whole = run(packed, *tensors(packed))
    heads_of_lse = {0: 0, 1: 0, 2: 1}[placement.dim]
    for rank in range(RANKS):
        with fake_group(rank, RANKS):
            mesh = init_device_mesh("cpu", (RANKS,))
            shards = [
                distribute_tensor(t, mesh, [placement], src_data_rank=None) for t in tensors(packed)
            ]
            bounds = distribute_tensor(BOUNDS, mesh, [Replicate()], src_data_rank=None)
            got = run(packed, *shards, bounds=bounds)
            for index, (part, full) in enumerate(zip(got, whole, strict=True)):
                dim = heads_of_lse if index == 1 else placement.dim
                assert part.placements == (Shard(dim),)
                assert part.shape == full.shape
                assert torch.equal(part.to_local(), full.chunk(RANKS, dim)[rank])


def test_sinks_are_sharded_with_their_heads() -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])

    def dsink(q, k, v, dout, sink) -> torch.Tensor:
        sink = sink.detach().requires_grad_()
        out = dash.attention(q, k, v, causal=True, sink=sink)
        return torch.autograd.grad(out, sink, dout)[0]

    whole = dsink(*tensors(False), sink)
    for rank in range(RANKS):
        with fake_group(rank, RANKS):
            mesh = init_device_mesh("cpu", (RANKS,))
            shards = [
                distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in tensors(False)
            ]
            own = distribute_tensor(sink, mesh, [Shard(0)], src_data_rank=None)
            got = dsink(*shards, own)
            assert got.placements == (Shard(0),)
            assert torch.equal(got.to_local(), whole.chunk(RANKS)[rank])


@pytest.mark.parametrize(
    ("kv_heads", "mesh_shape", "sharded"),
    [(4, (2, 4), True), (6, (2, 3), True), (6, (4, 2), False), (12, (2, 4), False)],
)
def test_a_mesh_of_two_dimensions_shards_heads_where_no_cut_is_uneven(
    kv_heads, mesh_shape, sharded
) -> None:
    """Over 2 · 4 ranks DTensor would give 12 KV heads as 2, 2, 2, 0 to four: other groups."""
    q = randn(1, 40, 2 * kv_heads, 16)
    k = randn(1, 40, kv_heads, 16)
    with fake_group(0, mesh_shape[0] * mesh_shape[1]):
        mesh = init_device_mesh("cpu", mesh_shape)
        placements = [Replicate(), Shard(2)]
        q, k = (distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (q, k))
        out = dash.attention(q, k, k)
        assert out.placements == (tuple(placements) if sharded else (Replicate(), Replicate()))


def test_heads_are_not_sharded_where_kv_heads_do_not_divide() -> None:
    """One KV head over two ranks: DTensor gathers, and each rank computes all."""
    with fake_group(0, RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        q, k, v, _ = (
            distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in tensors(False, 1)
        )
        assert dash.attention(q, k, v).placements == (Replicate(),)


def test_a_sequence_is_never_sharded() -> None:
    with fake_group(0, RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        q, k, v, _ = (
            distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for t in tensors(False)
        )
        out = dash.attention(q, k, v)
        assert Shard(1) not in out.placements
        assert out.shape == q.shape


def test_local_map_over_heads() -> None:
    whole = run(False, *tensors(False))
    by_heads = [Shard(2)]
    attend = local_map(
        functools.partial(dash.attention, causal=True, **STRATEGY),
        out_placements=by_heads, in_placements=(by_heads,) * 3,
    )  # fmt: skip
    for rank in range(RANKS):
        with fake_group(rank, RANKS):
            mesh = init_device_mesh("cpu", (RANKS,))
            *leaves, dout = (
                distribute_tensor(t, mesh, by_heads, src_data_rank=None) for t in tensors(False)
            )
            leaves = [t.requires_grad_() for t in leaves]
            out = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, dout)
            for part, full in zip((out, *grads), (whole[0], *whole[2:]), strict=True):
                assert torch.equal(part.to_local(), full.chunk(RANKS, 2)[rank])


# ---- Modules -------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections around dash; heads follow from what the projections give, so that they shard."""

    def __init__(self, hidden: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 16):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        return x + self.o(dash.attention(q, k, v, causal=True, **STRATEGY).flatten(2))


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).to(dtype)


def gradients(module: nn.Module, forward: Callable | None = None) -> dict[str, torch.Tensor]:
    """Of the input and of every parameter, whole where they are DTensors."""
    x = randn(2, 40, 64, seed=5).requires_grad_()
    out = (forward or module)(x)
    out.backward(randn(2, 40, 64, seed=6))
    grads = {name: p.grad for name, p in module.named_parameters()} | {"x": x.grad}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got.values(), wanted.values(), strict=True):
        assert torch.equal(ours, theirs)


def test_fsdp2_changes_no_bit() -> None:
    plain = gradients(model())
    with gloo_group():
        mesh = init_device_mesh("cpu", (1,))
        module = model(torch.float32)  # the weights that bfloat16 rounds to the plain model's
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in module:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        sharded = gradients(fully_shard(module, mesh=mesh, mp_policy=policy))
    assert_same({n: g.bfloat16() for n, g in sharded.items()}, plain)


def test_tensor_parallel_over_heads() -> None:
    """Column- and row-wise parallel projections around dash on each rank's own heads."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (1,))
        plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
        module = model()
        for block in module:
            parallelize_module(block, mesh, plan)
        assert_same(gradients(module), gradients(model()))
    for rank in range(RANKS):
        with fake_group(rank, RANKS):
            block = parallelize_module(
                Attention().bfloat16(), init_device_mesh("cpu", (RANKS,)), plan
            )
            assert block(randn(1, 40, 64)).shape == (1, 40, 64)
            assert block.q.weight.to_local().shape == (32, 64)


# ---- Activation checkpointing --------------------------------------------------------------------


def count_forwards(monkeypatch) -> list[int]:
    calls = []
    run = interface.run_forward

    def counting(*args, **more):
        calls.append(1)
        return run(*args, **more)

    monkeypatch.setattr(interface, "run_forward", counting)
    return calls


def selective() -> tuple:
    """Recomputes all but dash's forward."""

    def policy(_context, operator, *_args, **_more) -> CheckpointPolicy:
        keep = operator is torch.ops.dash.attention_fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


FORMS = {
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": selective},
}


@pytest.mark.parametrize("form", FORMS)
def test_activation_checkpointing_changes_no_bit(form, monkeypatch) -> None:
    plain = gradients(model())
    calls = count_forwards(monkeypatch)
    module = model()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in module:
            x = checkpoint(block, x, **FORMS[form])
        return x

    assert_same(gradients(module, forward), plain)
    assert len(calls) == (2 if form == "selective" else 4)


def test_checkpoint_wrapper_under_fsdp2() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = gradients(model())
    with gloo_group():
        mesh = init_device_mesh("cpu", (1,))
        module = nn.Sequential(*(checkpoint_wrapper(block) for block in model()))
        for block in module:
            fully_shard(block, mesh=mesh)
        assert_same(gradients(fully_shard(module, mesh=mesh)), plain)
