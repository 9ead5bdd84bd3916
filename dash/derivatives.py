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
Dims = tuple[int | None, ...]


def define_derivative(
    name: str,
    function: type[torch.autograd.Function],
    cuda_kernel: Callable[..., Tensors] | None = None,
) -> None:
    """Gives the operator ``name`` the derivative of ``function``, whose forward calls it.

    ``cuda_kernel``, the operator's own, is called without a second pass through the dispatcher
    where that could lead nowhere else.
    """
    operator = _operator(name)

    def autograd_kernel(*arguments: object) -> Tensors:
        if forward_ad._current_level >= 0 and _carries_tangent(arguments):
            raise_no_derivative(name, "a forward-mode derivative")
        if torch.is_grad_enabled() and _requires_grad(arguments):
            if torch._C._are_functorch_transforms_active():
                raise_no_derivative(name, "a torch.func derivative of the operator itself")
            # Function.apply binds defaults by inspection first, which takes 18 µs.
            return super(torch.autograd.Function, function).apply(*arguments)
        if cuda_kernel is not None and _only_cuda(arguments):
            return cuda_kernel(*arguments)
        return call_below_autograd(operator, arguments)

    torch.library.impl(name, "Autograd", autograd_kernel)


def _only_cuda(arguments: tuple[object, ...]) -> bool:
    """Whether no mode, transform or wrapper stands before the CUDA kernel."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for it in arguments:
        if isinstance(it, torch.Tensor) and (
            type(it) is not torch.Tensor or not it.is_cuda or it.is_neg()
        ):
            return False
    return True


def call_below_autograd(operator: Callable[..., Tensors], arguments: tuple) -> Tensors:
    """Calls an operator where autograd has had its say, sparing it the question again."""
    if torch._C._are_functorch_transforms_active():  # other levels may still have theirs
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def define_without_derivative(
    name: str, cuda_kernel: Callable[..., Tensors] | None = None
) -> Callable[..., object]:
    """Gives the operator ``name`` a derivative that raises: asking for it does, calling does not.

    ``cuda_kernel`` as of ``define_derivative``.

    Returns:
        The operator as an autograd Function calls it: inside torch.func's transforms, too.
    """
    operator = _operator(name)

    class WithoutDerivative(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: object) -> Tensors:
            return call_below_autograd(operator, arguments)

        @staticmethod
        def setup_context(ctx: object, inputs: tuple, output: Tensors) -> None:
            pass

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor | None) -> None:
            raise_no_derivative(name, "a gradient of attention's gradient")

        @staticmethod
        def jvp(ctx: object, *tangents: torch.Tensor | None) -> None:
            raise_no_derivative(name, "a forward-mode derivative")

    def call(*arguments: object) -> object:
        if torch._C._are_functorch_transforms_active():
            return WithoutDerivative.apply(*arguments)
        if torch.is_grad_enabled():  # create_graph=True
            return operator(*arguments)
        return call_below_autograd(operator, arguments)

    define_derivative(name, WithoutDerivative, cuda_kernel)
    return call


def define_batching(name: str, fold: bool) -> None:
    """Gives the operator ``name`` a rule for ``torch.func.vmap``, with the bits of a loop.

    Args:
        name: of the operator.
        fold: whether all of its tensors and outputs have a batch in front that no bit depends on,
            so that the dimension that vmap brings can become a part of it; else the rule is the
            loop.
    """
    operator = _operator(name)

    def folded(size: int, in_dims: Dims, arguments: tuple) -> Tensors:
        batched = [
            (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
            if isinstance(t, torch.Tensor)
            else t
            for t, dim in zip(arguments, in_dims, strict=True)
        ]
        return tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in operator(*batched))

    def looped(size: int, in_dims: Dims, arguments: tuple) -> Tensors | torch.Tensor:
        slices = [
            itertools.repeat(argument, size) if dim is None else argument.unbind(dim)
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        each = [operator(*one) for one in zip(*slices, strict=True)]
        if isinstance(each[0], torch.Tensor):
            return torch.stack(each)
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    def rule(info: object, in_dims: Dims, *arguments: object) -> tuple[object, object]:
        dims = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
        outputs = (folded if fold else looped)(info.batch_size, dims, arguments)
        return outputs, 0 if isinstance(outputs, torch.Tensor) else (0,) * len(outputs)

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
    for it in arguments:  # noqa: SIM110  any() takes twice as long
        if isinstance(it, torch.Tensor) and it.requires_grad:
            return True
    return False


def _carries_tangent(arguments: tuple[object, ...]) -> bool:
    tensors = (it for it in arguments if isinstance(it, torch.Tensor))
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
