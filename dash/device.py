"""The device as a plan sees it: how many CTAs of the kernel run at once, and nothing else.

Gradients never depend on it (docs/determinism.md). It decides the size of the grid, and whether a
cyclic strategy, whose chains wait for each other, may run at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dash.extension import extension

HOPPER = (9, 0)

# What plans assume where there is no Hopper GPU: the H200 that PERFORMANCE.md was measured on.
_H200_SMS = 132


@dataclass(frozen=True)
class DeviceModel:
    """What a plan may know about a device.

    Attributes:
        name: for people.
        resident_ctas: CTAs of the main kernel that are resident together; one a multiprocessor.
    """

    name: str
    resident_ctas: int


H200 = DeviceModel("model of an H200", _H200_SMS)


@functools.cache
def is_hopper(index: int) -> bool:
    """Whether CUDA device ``index`` can run the kernels (sm_90a)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) == HOPPER


def default_device() -> torch.device:
    """The current CUDA device where it is a Hopper GPU, else the CPU.

    Initialises CUDA, which ``planned_device`` does not.
    """
    if torch.cuda.is_available() and is_hopper(torch.cuda.current_device()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def planned_device() -> torch.device:
    """``default_device``, but the CPU in a process that has not initialised CUDA, which stays so:
    a plan may be made for a log before the process forks.
    """
    return default_device() if torch.cuda.is_initialized() else torch.device("cpu")


def device_model(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int | None = None
) -> DeviceModel:
    """The model of ``device`` for the kernel of these; the CPU's: an H200.

    ``head_dim_v`` is that of q and k where it is None.
    """
    if device.type != "cuda":
        return H200
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_model(index, dtype_name(dtype), head_dim, head_dim_v)


@functools.cache
def _cuda_model(index: int, dtype: str, head_dim: int, head_dim_v: int | None) -> DeviceModel:
    properties = torch.cuda.get_device_properties(index)
    if extension().HAS_KERNELS and is_hopper(index):
        resident = extension().resident_ctas(index, dtype, head_dim, head_dim_v)
    else:
        resident = properties.multi_processor_count
    return DeviceModel(properties.name, resident)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``, as ``dash._C`` names it."""
    return str(dtype).removeprefix("torch.")
