"""What a GPU does to a call: load on another stream, memory that held something else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from inputs import DEVICE, ON_GPU, Gradients, bits


class OtherStream:
    """Work on a second stream. Each ``enqueue`` adds a kernel of another length or kind.

    One for each call under test keeps the GPU busy throughout, with overlaps that always differ.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._sizes = itertools.cycle((3072, 1024, 0, 2048, 512))
        with torch.cuda.stream(self.stream):
            self._matrix = torch.randn(3072, 3072, device=DEVICE, dtype=torch.bfloat16)
            self._product = torch.empty_like(self._matrix)
            self._memory = torch.empty(2, 2**25, device=DEVICE, dtype=torch.uint8)
        self.stream.synchronize()

    def enqueue(self) -> None:
        size = next(self._sizes)
        with torch.cuda.stream(self.stream):
            if size == 0:
                self._memory[1].copy_(self._memory[0])
            else:
                part = self._matrix[:size]
                torch.mm(part, self._matrix, out=self._product[:size])


class DifferentCalls:
    """Counts, on the device and without waiting, the calls whose bits differ from the first's."""

    def __init__(self, first: Gradients) -> None:
        self._first = first
        self._count = torch.zeros((), dtype=torch.int32, device=first[0].device)

    def add(self, grads: Gradients) -> None:
        for x, y in zip(grads, self._first, strict=True):
            self._count += (bits(x) != bits(y)).any()

    def count(self) -> int:
        """Differing tensors so far; waits for the device."""
        return int(self._count.item())


def poison_allocator(byte: int) -> list[tuple[int, int]]:
    """Fills what torch's caching allocator will hand out next. Returns the address ranges.

    Blocks of every size class, small ones last, so that the tails of half-used segments are filled
    too. The next tensors come out of these ranges: uninitialised outputs and workspaces hold
    ``byte``. 0xFF is NaN in bf16, fp16 and fp32, and -1 as a counter.
    """
    if not ON_GPU:
        return []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = [2**exponent for exponent in range(27, 8, -1) for _ in range(6)]
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=DEVICE) for size in sizes]
    torch.cuda.synchronize()
    return [(b.data_ptr(), b.data_ptr() + b.numel()) for b in blocks]


def all_inside(tensors: Iterable[torch.Tensor], ranges: list[tuple[int, int]]) -> bool:
    return all(any(low <= t.data_ptr() < high for low, high in ranges) for t in tensors)
