"""Whether the installed driver runs the CUDA that the kernels were built with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import dash

FIRST_DRIVER = {12: "525", 13: "580"}  # NVIDIA's release notes: the first driver of each CUDA major


@dataclass(frozen=True)
class Fit:
    """Attributes: whether driver and build fit; what to say of it."""

    good: bool
    text: str


def driver_cuda() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver runs; None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def fit(built_with: str, driver: tuple[int, int]) -> Fit:
    """Kernels of a CUDA major run under every driver of that major or a later one.

    Args:
        built_with: ``13.0``, of ``dash._C.CUDA_VERSION``.
        driver: of ``driver_cuda``.
    """
    major = int(built_with.partition(".")[0])
    runs = f"the driver runs CUDA {driver[0]}.{driver[1]}, the kernels were built with {built_with}"
    if driver[0] >= major:
        return Fit(True, runs)
    release = dash.__version__.partition("+")[0]
    wheel = f"dash-attention=={release}+cu{driver[0]}"
    newer = FIRST_DRIVER.get(major, "newer")
    return Fit(False, f"{runs}: install {wheel}, or a driver from {newer} on")
