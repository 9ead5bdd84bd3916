"""Whether gradients repeat bit for bit, with memory that is different each time."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Repeats:
    """Attributes: calls compared with the first; how many differed from it; the first's digest."""

    calls: int
    different: int
    digest: str


def poison(like: Iterable[torch.Tensor], extra_bytes: int) -> None:
    """Leaves NaN bytes in the allocator's free blocks of the sizes that the next call will take."""
    sizes = [*(t.numel() * t.element_size() for t in like), extra_bytes]
    device = next(iter(like)).device
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del blocks


def repeat(
    backward: Callable[[], Gradients], count: int, workspace_bytes: int, track: Callable
) -> Repeats:
    """Calls ``backward`` once and then ``count`` times, and compares bits.

    Args:
        backward: returns dq, dk, dv.
        count: calls to compare with the first.
        workspace_bytes: of a call, so that its memory can be poisoned too.
        track: wraps an iterable, to show progress.
    """
    first = backward()
    different = 0
    for _ in track(range(count)):
        poison(first, workspace_bytes)
        different += not equal_bits(backward(), first)
    return Repeats(count, different, digest(first))


def equal_bits(grads: Gradients, others: Gradients) -> bool:
    """Whether no bit differs."""
    return all(map(torch.equal, map(_bits, grads), map(_bits, others)))


def digest(grads: Gradients) -> str:
    """16 hex digits of the gradients' bits."""
    total = hashlib.sha256()
    for grad in grads:
        host = grad.contiguous().cpu()
        total.update(ctypes.string_at(host.data_ptr(), host.nbytes))
    return total.hexdigest()[:16]


def _bits(t: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals itself and -0 does not equal 0."""
    return t.view(torch.int16)
