"""Memory that is about to be written whole: without the fill that PyTorch's switch would pay for.

``torch.use_deterministic_algorithms(True)`` fills what ``torch.empty`` and its kin return, and what
``clone`` copies into, with NaN first. Where each element is written anyway that is a write for
nothing: 24% of a call of 32 sequences of 512. A tensor set upon a bare storage escapes it.
"""

from __future__ import annotations

import itertools
import math
import operator

import torch


def uninitialized_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the shape, dtype and device of ``tensor``.

    For ordinary tensors only: fakes and traces go through ``Tensor.new_empty``.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return uninitialized(tensor, tuple(tensor.shape), tensor.dtype)


def uninitialized(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of that shape and dtype on the device of ``like``."""
    tensor = like.new_empty(0, dtype=dtype)
    storage = torch.UntypedStorage(math.prod(shape) * tensor.element_size(), device=like.device)
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tensor.set_(storage, 0, shape, tuple(strides)[::-1] if shape else ())


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` where it is contiguous, else a copy that is."""
    return tensor if tensor.is_contiguous() else contiguous_copy(tensor)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, whatever the strides of ``tensor``."""
    return uninitialized_like(tensor).copy_(tensor)
