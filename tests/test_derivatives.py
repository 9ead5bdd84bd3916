"""No gradient is lost in silence: torch.func, forward mode, second derivatives (CASES 24, 29)."""

from __future__ import annotations

import pytest
import torch
from op_calls import assert_same_bits, backward, call, qkv, randn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import dash


def test_a_scale_that_wants_a_gradient_is_refused_by_name() -> None:
    scale = torch.tensor(0.125, requires_grad=True)
    with pytest.raises(dash.UnsupportedError, match=r"softmax_scale is a Tensor; required: a num"):
        dash.attention(*qkv(), softmax_scale=scale)


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return dash.attention(q, k, v, causal=True).float().square().sum()


def test_torch_func_grad_has_the_bits_of_autograd() -> None:
    q, k, v = qkv()
    wanted = torch.autograd.grad(loss(*(t.requires_grad_() for t in (q, k, v))), (q, k, v))
    tensors = [t.detach() for t in (q, k, v)]
    assert_same_bits(torch.func.grad(loss, argnums=(0, 1, 2))(*tensors), wanted)
    _, pull_back = torch.func.vjp(loss, *tensors)
    assert_same_bits(pull_back(torch.ones(())), wanted)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, None)])
def test_per_sample_gradients_have_the_bits_of_a_loop(in_dims) -> None:
    tensors = [randn(3, 2, 70, 4, 64, seed=1), *(randn(3, 2, 70, 2, 64, seed=s) for s in (2, 3))]
    tensors = [t[0] if dim is None else t for t, dim in zip(tensors, in_dims, strict=True)]
    gradient = torch.func.grad(loss, argnums=(0, 1, 2))

    def sample(i: int) -> list[torch.Tensor]:
        pairs = zip(tensors, in_dims, strict=True)
        return [t if dim is None else t[i] for t, dim in pairs]

    moved = [t.movedim(0, dim) if dim else t for t, dim in zip(tensors, in_dims, strict=True)]
    got = torch.func.vmap(gradient, in_dims=in_dims)(*moved)
    out = torch.func.vmap(dash.attention, in_dims=in_dims)(*moved)
    for i in range(3):
        assert torch.equal(out[i], dash.attention(*sample(i)))
        assert_same_bits([g[i] for g in got], gradient(*sample(i)))


def test_forward_mode_and_second_derivatives_name_dash() -> None:
    q, k, v = qkv()
    arguments = tuple(call().values())
    with pytest.raises(NotImplementedError, match=r"dash\.attention"):
        torch.func.jvp(dash.attention, (q, k, v), (q, k, v))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="dash"):
            dash.attention(dual, k, v)
        with pytest.raises(NotImplementedError, match="dash::attention_bwd"):
            torch.ops.dash.attention_bwd(arguments[0], dual, *arguments[2:])
    with pytest.raises(NotImplementedError, match="dash"):
        torch.func.hessian(loss)(q, k, v)
    with pytest.raises(NotImplementedError, match="dash::attention_bwd"):
        torch.func.grad(lambda d: backward({"dout": d, **dict(list(call().items())[1:])})[0].sum())(
            arguments[0]
        )


@pytest.mark.gpu
def test_what_stands_before_the_cuda_kernel_is_not_passed_by() -> None:
    """Modes, transforms and views that the dispatcher undoes, where autograd calls the kernel."""
    arguments = [t.cuda() for t in call().values()]
    operator = torch.ops.dash.attention_bwd
    wanted = operator(*arguments)
    with FlopCounterMode(display=False) as counter:
        operator(*arguments)
    assert counter.get_total_flops() == 5 * 2 * 2 * 4 * 96 * 160 * 64
    negative = torch._neg_view(-arguments[0])
    assert negative.is_neg()
    assert_same_bits(operator(negative, *arguments[1:]), wanted)
    twice = torch.stack((arguments[0], arguments[0]))
    got = torch.func.vmap(lambda dout: operator(dout, *arguments[1:]))(twice)
    assert_same_bits([g[1] for g in got], wanted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert all(isinstance(g, FakeTensor) for g in operator(*arguments))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operator(*arguments)
    assert [event.name for event in profile.events()].count("dash::attention_bwd") == 1
