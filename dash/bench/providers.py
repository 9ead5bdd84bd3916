"""Backward passes that can be timed side by side: dash, and what PyTorch has for the same problem.

A provider is prepared for a problem and then gives windows of time: the whole backward, nothing
else. What it cannot run raises ``Unavailable`` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

import dash
from dash.bench.flash2 import Flash2
from dash.bench.inputs import Tensors
from dash.bench.measure import (
    Call,
    Meter,
    Window,
    poison_free_memory,
    seconds_of_a_call,
    sustained_window,
    synchronize,
)
from dash.bench.shapes import Shape

LARGEST_DIFFERENCE = 0.02  # relative, between two right bf16 backwards: about 0.004


class Unavailable(Exception):
    """Why a provider has no number for a problem."""


@dataclass
class Prepared:
    """A provider ready for one problem.

    Attributes:
        window: seconds → what a window of that length measured; raises ``Unavailable``.
        strategy, fingerprint: of dash's plan.
        version: of what was called.
    """

    window: Callable[[float], Window]
    strategy: str = ""
    fingerprint: str = ""
    version: str = ""


class Provider(Protocol):
    """Attributes: name in CSV files and tables; whether it promises the same bits each time."""

    name: str
    deterministic: bool

    def prepare(self, shape: Shape, tensors: Tensors) -> Prepared: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CallProvider:
    """A backward that this process calls.

    ``calls`` maps a problem to the call and what a row says about it.
    """

    name: str
    deterministic: bool
    calls: Callable[[Shape, Tensors], tuple[Call, dict[str, str]]]
    meter: Meter

    def prepare(self, shape: Shape, tensors: Tensors) -> Prepared:
        try:
            call, facts = self.calls(shape, tensors)
            check(call, tensors)
        except (RuntimeError, NotImplementedError, dash.UnsupportedError, TypeError) as error:
            raise Unavailable(first_sentence(error)) from error
        seconds = seconds_of_a_call(call)
        return Prepared(lambda length: sustained_window(call, length, seconds, self.meter), **facts)

    def close(self) -> None:
        pass


def first_sentence(error: Exception) -> str:
    """PyTorch's messages go on for pages."""
    return str(error).splitlines()[0].partition(". ")[0]


def check(call: Call, t: Tensors) -> None:
    """Runs ``call`` on poisoned memory and compares its gradients with ``t``'s."""
    call()
    poison_free_memory()
    got = call()
    synchronize()
    for name, x, wanted in zip(("dq", "dk", "dv"), got, t.gradients, strict=True):
        x = like(x, wanted)
        difference = ((x.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            raise Unavailable(f"WRONG: {name} differs from the reference by {difference:.3g}")


def like(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A gradient with heads before rows, or with padded columns, as ``wanted`` has them."""
    x = x[..., : wanted.shape[-1]]
    return x if x.shape == wanted.shape else x.transpose(1, 2)


def dash_calls(strategy: str) -> Callable[[Shape, Tensors], tuple[Call, dict[str, str]]]:
    def calls(shape: Shape, t: Tensors) -> tuple[Call, dict[str, str]]:
        windows = {"window_left": shape.window_left, "window_right": shape.window_right}
        options = {"causal": shape.causal, "strategy": strategy}
        options |= {name: size for name, size in windows.items() if size is not None}
        tensors = (t.dout, t.q, t.k, t.v, t.out, t.lse)
        if shape.packed:
            tensors += (t.cu_seqlens, t.cu_seqlens)
            operator = torch.ops.dash.attention_varlen_bwd.default
            plan = dash.plan_varlen(
                shape.q_shape, shape.k_shape, t.q.dtype, seqlens_q=shape.lengths,
                head_dim_v=shape.head_dim_v, **options,
            )  # fmt: skip
            used = {one.plan.strategy for one in plan.sequences if one.plan is not None}
            facts = {"strategy": "+".join(sorted(used)), "fingerprint": plan.fingerprint}
        else:
            more = options | {"head_dim_v": shape.head_dim_v}
            plan = dash.plan(shape.q_shape, shape.k_shape, t.q.dtype, **more)
            facts = {"strategy": plan.strategy, "fingerprint": plan.fingerprint}
            operator = torch.ops.dash.attention_bwd.default
        return (lambda: operator(*tensors, **options)), facts | {"version": dash.__version__}

    return calls


def flash_calls(deterministic: bool) -> Callable[[Shape, Tensors], tuple[Call, dict[str, str]]]:
    """PyTorch's FlashAttention-2."""

    def calls(shape: Shape, t: Tensors) -> tuple[Call, dict[str, str]]:
        flash = Flash2(shape, t.q, t.k, t.v, t.cu_seqlens)
        dout = torch.nn.functional.pad(t.dout, (0, shape.head_dim - shape.head_dim_v))

        def call() -> tuple[torch.Tensor, ...]:
            return flash.padded_backward(dout)

        return (told_to_be_deterministic(call) if deterministic else call), {
            "version": f"torch {torch.__version__}"
        }

    return calls


def cudnn_calls(shape: Shape, t: Tensors) -> tuple[Call, dict[str, str]]:
    """PyTorch's cuDNN attention.

    The backward's arguments are matched to the forward's results by the names in its schema, which
    outlast their order.
    """
    if shape.packed or shape.windowed:
        raise Unavailable("PyTorch's cuDNN operator takes no packed sequences and no windows")
    if shape.causal and shape.seqlen != shape.seqlen_k:
        raise Unavailable("PyTorch's cuDNN operator aligns its causal mask top-left")
    given = {
        "query": t.q.transpose(1, 2),
        "key": t.k.transpose(1, 2),
        "value": t.v.transpose(1, 2),
        "attn_bias": None,
        "compute_log_sumexp": True,
        "dropout_p": 0.0,
        "is_causal": shape.causal,
        "return_debug_mask": False,
        "scale": shape.head_dim**-0.5,
    }
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    results = forward(**{a.name: given[a.name] for a in forward._schema.arguments})
    named = dict(zip((r.name for r in forward._schema.returns), results, strict=True))
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    known = named | given | {"out": named["output"], "grad_out": t.dout.transpose(1, 2)}
    arguments = {a.name: known[a.name] for a in backward._schema.arguments}
    version = f"cuDNN {torch.backends.cudnn.version()}"
    return (lambda: backward(**arguments)), {"version": version}


def told_to_be_deterministic(call: Call) -> Call:
    def deterministic() -> tuple[torch.Tensor, ...]:
        with deterministic_algorithms():
            return call()

    return deterministic


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """What FlashAttention-2 in PyTorch asks for its order; without PyTorch's fill of new memory."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
