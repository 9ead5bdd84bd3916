"""Backward passes that can be timed side by side: dash, and what PyTorch has for the same problem.

A provider is prepared for a problem, which gives the call to be timed: the whole backward, nothing
else. What it cannot run raises ``Unavailable`` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import dash
from benchmarks.measure import Call, poison_free_memory, synchronize
from benchmarks.shapes import Shape
from dash.cli.providers import deterministic_algorithms

LARGEST_DIFFERENCE = 0.02  # relative, between two right bf16 backwards: about 0.004


class Unavailable(Exception):
    """Why a provider has no number for a problem."""


@dataclass(frozen=True)
class Tensors:
    """One problem, ``(batch, seqlen, heads, head_dim)``, with FA2's out, lse and gradients."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


@dataclass
class Prepared:
    """A provider ready for one problem."""

    call: Call
    strategy: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Provider:
    name: str
    prepare: Callable[[Shape, Tensors], Prepared] = field(repr=False)


def make_tensors(shape: Shape) -> Tensors:
    """Normal inputs, never zeros."""
    torch.manual_seed(0)

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    dout, q, k, v = (
        normal(s) for s in (shape.q_shape, shape.q_shape, shape.kv_shape, shape.kv_shape)
    )
    forward, backward = operator_pair("flash", shape, dout, q, k, v)
    out = forward["out"].transpose(1, 2).contiguous()
    gradients = tuple(g.transpose(1, 2).contiguous() for g in backward())
    return Tensors(dout, q, k, v, out, forward["logsumexp"].contiguous(), gradients)


def operator_pair(
    kind: str, shape: Shape, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[dict[str, object], Call]:
    """PyTorch's ``flash`` or ``cudnn`` attention: the forward's results by name, the backward.

    The backward's arguments are matched to the forward's results by the names in its schema, which
    outlast their order.
    """
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    scale = shape.head_dim**-0.5
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    given = {"dropout_p": 0.0, "is_causal": shape.causal, "attn_bias": None}
    given |= {"query": query, "key": key, "value": value, "scale": scale}
    given |= {"compute_log_sumexp": True, "return_debug_mask": False}
    results = forward(**{a.name: given[a.name] for a in forward._schema.arguments})
    named = dict(zip((r.name for r in forward._schema.returns), results, strict=True))
    named["out"] = named["output"]
    if "rng_state" in named:  # flash's names for its two random states
        named["philox_seed"], named["philox_offset"] = named["rng_state"], named["unused"]

    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    known = named | given | {"grad_out": dout.transpose(1, 2)}
    arguments = {a.name: known[a.name] for a in backward._schema.arguments}
    return named, lambda: backward(**arguments)


def dash_provider(strategy: str) -> Provider:
    def prepare(shape: Shape, t: Tensors) -> Prepared:
        try:
            plan = dash.plan(
                shape.q_shape, shape.kv_shape, t.q.dtype, causal=shape.causal, strategy=strategy
            )
        except dash.UnsupportedError as error:
            raise Unavailable(str(error)) from error
        arguments = (t.dout, t.q, t.k, t.v, t.out, t.lse, None, shape.causal, strategy)
        call = checked(lambda: torch.ops.dash.attention_bwd(*arguments), t, transposed=False)
        return Prepared(call, plan.strategy, plan.fingerprint)

    return Provider("dash" if strategy == "auto" else f"dash:{strategy}", prepare)


def torch_provider(name: str, kind: str, deterministic: bool) -> Provider:
    def prepare(shape: Shape, t: Tensors) -> Prepared:
        try:
            call = operator_pair(kind, shape, t.dout, t.q, t.k, t.v)[1]
            if deterministic:
                call = told_to_be_deterministic(call)
            return Prepared(checked(call, t, transposed=True))
        except RuntimeError as error:
            raise Unavailable(str(error).splitlines()[0]) from error

    return Provider(name, prepare)


def checked(call: Call, t: Tensors, *, transposed: bool) -> Call:
    """``call`` itself, after one run on poisoned memory that agreed with FA2's gradients."""
    call()
    poison_free_memory()
    got = call()
    synchronize()
    for name, x, wanted in zip(("dq", "dk", "dv"), got, t.gradients, strict=True):
        x = x.transpose(1, 2) if transposed else x
        difference = ((x.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            raise Unavailable(f"WRONG: {name} differs from FA2's by {difference:.3g}")
    return call


def told_to_be_deterministic(call: Call) -> Call:
    def deterministic() -> tuple[torch.Tensor, ...]:
        with deterministic_algorithms():
            return call()

    return deterministic


PROVIDERS = {
    "fa2_det": torch_provider("fa2_det", "flash", deterministic=True),
    "fa2_nondet": torch_provider("fa2_nondet", "flash", deterministic=False),
    "cudnn_nondet": torch_provider("cudnn_nondet", "cudnn", deterministic=False),
}


def find_provider(name: str) -> Provider:
    """``dash``, ``dash:STRATEGY`` or a name of ``PROVIDERS``."""
    if name == "dash":
        return dash_provider("auto")
    if name.startswith("dash:"):
        return dash_provider(name.removeprefix("dash:"))
    return PROVIDERS[name]
