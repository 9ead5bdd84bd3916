"""What autograd does with dash's operators: one rule for both, and no gradient lost in silence.

An operator gets the derivative of an autograd Function. Where an input carries what the Function
does not do (a forward-mode tangent), or where a transform of ``torch.func`` meets the operator
itself instead of ``dash.attention``, which knows them, an error names dash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad

Tensors = tuple[torch.Tensor, ...]


def define_derivative(name: str, function: type[torch.autograd.Function]) -> None:
    """Gives the operator ``name`` the derivative of ``function``, whose forward calls it."""
    operator = _operator(name)

    def autograd_kernel(*arguments: object) -> Tensors:
        if _carries_tangent(arguments):
            raise_no_derivative(name, "a forward-mode derivative")
        if torch.is_grad_enabled() and _requires_grad(arguments):
            if torch._C._are_functorch_transforms_active():
                raise_no_derivative(name, "a torch.func derivative of the operator itself")
            # Function.apply binds defaults by inspection first, which takes 18 µs.
            return super(torch.autograd.Function, function).apply(*arguments)
        return call_below_autograd(operator, arguments)

    torch.library.impl(name, "Autograd", autograd_kernel)


def call_below_autograd(operator: Callable[..., Tensors], arguments: tuple) -> Tensors:
    """Calls an operator where autograd has had its say, sparing it the question again."""
    if torch._C._are_functorch_transforms_active():  # other levels may still have theirs
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def define_batching(name: str, tensors: int, fold: bool) -> None:
    """Gives the operator ``name`` a rule for ``torch.func.vmap``, with the bits of a loop.

    Args:
        name: of the operator.
        tensors: how many tensors its arguments start with.
        fold: whether these and the outputs have a batch in front that no bit depends on, so that
            the dimension that vmap brings can become a part of it; else the rule is the loop.
    """
    operator = _operator(name)

    def rule(info: object, in_dims: tuple, *arguments: object) -> tuple[Tensors, tuple[int, ...]]:
        size = info.batch_size
        if fold:
            rest = arguments[tensors:]
            batched = [
                t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
                for t, dim in zip(arguments[:tensors], in_dims, strict=False)
            ]
            folded = operator(*(t.flatten(0, 1) for t in batched), *rest)
            outputs = tuple(t.unflatten(0, (size, batched[0].shape[1])) for t in folded)
        else:
            dims = itertools.chain(in_dims, itertools.repeat(None))
            slices = [
                itertools.repeat(argument, size) if dim is None else argument.unbind(dim)
                for argument, dim in zip(arguments, dims, strict=False)
            ]
            each = [operator(*one) for one in zip(*slices, strict=True)]
            outputs = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return outputs, (0,) * len(outputs)

    torch.library.register_vmap(name, rule)


def _operator(name: str) -> Callable[..., Tensors]:
    """The overload ``dash::name.overload``, or the default one of ``dash::name``."""
    packet, _, overload = name.removeprefix("dash::").partition(".")
    return getattr(getattr(torch.ops.dash, packet), overload or "default")


def raise_no_derivative(name: str, what: str) -> None:
    raise NotImplementedError(
        f"{name} has no derivative of this kind: {what} was asked for (double backward, "
        "create_graph=True, jvp). dash.attention has first derivatives in reverse mode, under "
        "torch.func too. Where others are needed use the math backend of "
        "torch.nn.functional.scaled_dot_product_attention."
    )


def _requires_grad(arguments: tuple[object, ...]) -> bool:
    return any(isinstance(it, torch.Tensor) and it.requires_grad for it in arguments)


def _carries_tangent(arguments: tuple[object, ...]) -> bool:
    if forward_ad._current_level < 0:
        return False
    tensors = (it for it in arguments if isinstance(it, torch.Tensor))
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
