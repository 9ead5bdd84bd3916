"""``dash.checksum``: a position-dependent checksum of tensors' bits, computed where they lie.

Comparing two runs, two ranks or a resumed run needs a number a step that every bit changes. Sums of
values cancel, and an XOR of bit patterns cancels equal changes in two places. Here each element
gives a 64-bit word, mixed from its bits, its position in its tensor and the tensor's name, and the
words are added modulo 2^64: integer addition has no order, so the number is exact and repeatable.

For a sharded tensor (DTensor) positions are those in the whole tensor and a replicated part counts
once, so the sum over the ranks (``Checksum.all_reduce``) equals the checksum of the whole tensor on
one device, however it is sharded.

It finds differences between honest runs; it is no cryptographic hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

# 64-bit odd constants: two of SplitMix64's finalizer (Steele, Lea, Flood 2014) and two from the
# fractional digits of the golden ratio and of pi.
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS, _POSITION = 0x9E3779B97F4A7C15, 0x243F6A8885A308D3

# Elements mixed at a time: bounds the 64-bit temporaries to some hundred MB beside any tensor.
_CHUNK = 1 << 23

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """A checksum on its device: nothing waits for it until it is shown, compared or read.

    Attributes:
        value: 0-d int64 tensor.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def all_reduce(self, group: object | None = None) -> Checksum:
        """The sum over the ranks of a process group, on each of them (a collective call)."""
        total = self.value.clone()
        torch.distributed.all_reduce(total, group=group)
        return Checksum(total)

    def __int__(self) -> int:
        return int(self.value) % 2**64

    def __str__(self) -> str:
        return f"{int(self):016x}"

    def __repr__(self) -> str:
        return f"Checksum({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checksum) and int(self) == int(other)

    __hash__ = None


def checksum(
    tensors: torch.Tensor | Iterable[torch.Tensor] | Mapping[str, torch.Tensor],
) -> Checksum:
    """Checksum of the bits of one tensor, of several in order, or of several by name.

    Names, shapes, dtypes and each element's position count; strides, devices, requires_grad and, in
    a mapping, the order do not. -0 differs from 0, and each NaN is the bits that it is.

    Args:
        tensors: any dtypes and layouts with plain elements; DTensors give this rank's part.

    Returns:
        On the device of the first tensor, enqueued and not waited for. 0 for no tensors.

    Raises:
        TypeError: a tensor has no plain elements (sparse, quantized).
    """
    named = _named(tensors)
    device = next(iter(named.values())).device if named else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for name, tensor in named.items():
            key = _key(name, tensor)
            part = _sum_of_words(*_local(tensor), key)
            if part is not None:
                total += part.to(device, non_blocking=True)
    return Checksum(total)


def _named(tensors: object) -> dict[str, torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return {"0": tensors}
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _key(name: str, tensor: torch.Tensor) -> int:
    """64 bits of a tensor's name, dtype and (whole) shape."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name} has layout {tensor.layout}; required: torch.strided")
    text = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's elements, the whole tensor's shape, and the elements' offset in it."""
    if not hasattr(tensor, "device_mesh"):
        return tensor, tuple(tensor.shape), (0,) * tensor.dim()
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError(f"a DTensor is placed {placements}; required: no pending sum")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local()
    copies = [mesh.get_local_rank(d) for d, p in enumerate(placements) if p == Replicate()]
    if any(copies):  # another rank counts these elements
        local = local.new_empty((0, *local.shape[1:]))
    elif tuple(local.shape) != tuple(shape):
        raise TypeError(f"a DTensor's shard is {tuple(local.shape)}; required: {tuple(shape)}")
    return local, tuple(tensor.shape), tuple(offset)


def _sum_of_words(
    elements: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], key: int
) -> torch.Tensor | None:
    if elements.numel() == 0:
        return None
    if elements.dim() == 0:
        elements, shape, offset = elements.reshape(1), (1,), (0,)
    if elements.is_complex():
        elements = torch.view_as_real(elements)
        shape, offset = (*shape, 2), (*offset, 0)
    bits = elements if elements.dtype == torch.bool else _as_integers(elements)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # Rows of the leading dimension are taken together up to the chunk, larger ones one at a time.
    rows = max(1, _CHUNK * len(bits) // bits.numel())
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), rows):
        some = bits[first : first + rows]
        positions = _positions(some, strides, (offset[0] + first, *offset[1:]))
        total += _mix(some.long() * _signed(_BITS) + positions * _signed(_POSITION) + _signed(key))
    return total


def _as_integers(elements: torch.Tensor) -> torch.Tensor:
    size = elements.element_size()
    if size not in _INTEGERS:
        raise TypeError(f"dtype {elements.dtype} has elements of {size} bytes; required: 1 to 8")
    return elements.detach().view(_INTEGERS[size])


def _positions(some: torch.Tensor, strides: list[int], offset: tuple[int, ...]) -> torch.Tensor:
    """int64 of ``some``'s shape: where in the whole tensor, counted in row-major order."""
    total = torch.zeros((), dtype=torch.int64, device=some.device)
    for d, (size, stride, start) in enumerate(zip(some.shape, strides, offset, strict=True)):
        index = torch.arange(start, start + size, device=some.device) * stride
        total = total + index.view(-1, *(1,) * (some.dim() - d - 1))
    return total


def _mix(words: torch.Tensor) -> torch.Tensor:
    """The sum of SplitMix64's finalizer over int64 words, which are overwritten."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1]), (31, 1)):
        high = words >> shift
        words ^= high.bitwise_and_((1 << (64 - shift)) - 1)  # >> repeats the sign bit
        words *= _signed(factor)
    return words.sum()


def _signed(word: int) -> int:
    """A 64-bit pattern as the Python int that torch takes for int64."""
    return word - 2**64 if word >= 2**63 else word
