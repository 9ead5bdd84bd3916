"""What reaches into a call from outside (shared/CASES.md 17, 18, 23, 27, 28), on the CPU.

What takes a GPU is in test_contexts.py; rows that a mask hides (20, 27) in test_reference.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from op_calls import (
    BFLOAT16,
    assert_same_bits,
    attention_and_gradients,
    backward,
    call,
    qkv,
)
from torch.utils.flop_counter import FlopCounterMode

import dash
from dash import ops, support
from dash.forward import plain_forward
from dash.memory import contiguous_copy, uninitialized_like

SHAPE = (2, 1024, 8, 128)

# ---- 17: torch.use_deterministic_algorithms fills what is about to be written --------------------


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (0, 3, 4, 8), (5,), ()])
def test_what_will_be_written_whole_is_not_filled(deterministic, shape) -> None:
    like = torch.ones(shape).mT if len(shape) > 1 else torch.ones(shape)
    mode = _Allocations()
    with mode:
        made = uninitialized_like(like)
    assert (made.shape, made.dtype) == (like.shape, like.dtype)
    assert made.is_contiguous()
    assert made.stride() == torch.empty(like.shape).stride()
    assert mode.filled_elements == 0
    assert torch.equal(contiguous_copy(like), like)


def test_outputs_and_copies_escape_the_fill(deterministic, monkeypatch) -> None:
    class Module:
        backward = staticmethod(lambda *arguments: None)

    tensors = call()
    tensors["dout"] = tensors["dout"][:, :, :1].expand(-1, -1, 4, -1)  # copied for TMA
    monkeypatch.setattr(ops, "extension", lambda: Module)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    ops._attention_bwd_cuda(*tensors.values())
    with _Allocations() as mode:
        ops._attention_bwd_cuda(*tensors.values())
    assert mode.filled_elements == 0


class _Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of tensors that PyTorch's switch fills: what ``empty`` and kin return."""

    filled_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("empty", "empty_like", "new_empty", "clone"):
            self.filled_elements += result.numel()
        return result


# ---- 18: autocast, default dtype and default device reach into nothing ---------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit_of_16_bit_inputs(dtype, autocast) -> None:
    tensors = qkv(dtype=dtype, causal=True)
    wanted = attention_and_gradients(tensors, causal=True)
    with torch.autocast("cpu", autocast):
        got = attention_and_gradients(tensors, causal=True)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(got, wanted, strict=True))
    arguments = call(dtype=dtype)
    wanted = backward(arguments)
    with torch.autocast("cpu", autocast):
        assert_same_bits(backward(arguments), wanted)


def test_autocast_casts_float32_as_for_sdpa() -> None:
    tensors = [t.float() for t in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        out, *grads = attention_and_gradients(tensors)
    wanted, *rounded = attention_and_gradients([t.bfloat16() for t in tensors])
    assert torch.equal(out, wanted)
    assert all(g.dtype == torch.float32 for g in grads)
    assert_same_bits([g.bfloat16() for g in grads], rounded)
    with pytest.raises(dash.UnsupportedError, match=r"q has dtype torch\.float32"):
        dash.attention(*tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_no_bit(dtype) -> None:
    tensors = qkv()
    wanted = attention_and_gradients(tensors, causal=True)
    torch.set_default_dtype(dtype)
    try:
        got = attention_and_gradients(tensors, causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_the_default_device_changes_nothing() -> None:
    tensors = qkv()
    wanted = attention_and_gradients(tensors, causal=True)
    with torch.device("meta"):
        got = attention_and_gradients(tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# ---- 23: public objects travel -------------------------------------------------------------------


@pytest.mark.parametrize("travel", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_errors_and_plans_travel(travel) -> None:
    error = dash.UnsupportedError(["one", "two"])
    assert str(travel(error)) == str(error) == "dash cannot run this: one; also: two"
    assert travel(error).reasons == ["one", "two"]
    p = dash.plan(SHAPE, SHAPE, BFLOAT16, causal=True, device="cpu")
    again = travel(p)
    assert again == p
    assert hash(again) == hash(p)
    assert str(again) == str(p)
    assert again.reasons == p.reasons
    fields = dataclasses.asdict(p)
    assert fields["strategy"] == p.strategy
    assert fields["alternatives"] == p.alternatives


# ---- 28: what people attach ----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_counted_as_for_sdpa(causal) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(seqlen_q=96, seqlen_k=160))
    product = 2 * 2 * 4 * 96 * 160 * 64
    with FlopCounterMode(display=False) as counter:
        out = dash.attention(q, k, v, causal=causal)
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * product


def test_the_profiler_names_both_passes() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dash.attention(q, k, v).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"dash::attention_fwd", "dash::attention_bwd"} <= names


def test_a_plan_says_once_what_else_could_run() -> None:
    p = dash.plan(SHAPE, SHAPE, BFLOAT16, causal=False, device="cpu")
    lines = str(p).splitlines()
    assert len(p.alternatives) > 1
    assert [line for line in lines if "could run" in line] == [
        f"{'could run':<{lines[0].index('q (')}}{', '.join(p.alternatives)}"
    ]


def test_plain_forward_shows_overflow() -> None:
    """CASES 27: out and the gradients are not finite."""
    q, k, v = ((t.float() * 1e20).bfloat16() for t in qkv(seqlen_q=70, seqlen_k=70))
    out, _ = plain_forward(q, k, v, 0.125, True)
    assert not out.isfinite().all()
    _, *grads = attention_and_gradients([q, k, v], causal=True)
    assert not any(g.isfinite().all() for g in grads)
    assert support.reasons(q, k, v) == []
