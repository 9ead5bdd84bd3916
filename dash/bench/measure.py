"""Sustained windows: time by CUDA events, SM clock and energy by NVML, over a second or more.

Under the power limit a short burst runs at the clock that its neighbour left it, so a window first
plays a quarter of its length untimed, and no provider follows the same neighbour in every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], tuple[torch.Tensor, ...]]

WARM_UP = 0.25  # of a window's length, played before it

POISON = 0xFF  # NaN in bf16, fp16 and fp32


@dataclass(frozen=True)
class Window:
    """Milliseconds a call; SM clock in MHz and energy in joules a call, NaN without NVML."""

    ms: float
    sm_clock: float
    joules: float


class Meter:
    """NVML's readings of one GPU; NaN and "unknown" where there is no NVML."""

    def __init__(self, index: int = 0) -> None:
        self._nvml = self._device = None
        self.why_not = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._nvml = pynvml
        except Exception as error:  # NVML's errors share no base class with a missing module's
            self.why_not = f"no clocks and no energy: {error}"

    @property
    def driver(self) -> str:
        return "unknown" if self._nvml is None else str(self._nvml.nvmlSystemGetDriverVersion())

    def joules(self) -> float:
        """The GPU's energy since the driver was loaded."""
        if self._nvml is None:
            return float("nan")
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1e3

    def sm_clock(self) -> float:
        if self._nvml is None:
            return float("nan")
        return float(self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM))


def window_orders(providers: int, rounds: int) -> list[list[int]]:
    """For each round the order of the providers' windows, by E. J. Williams' design of 1949.

    Over ``providers`` rounds (twice as many where that is odd) each provider comes once (twice) at
    each place and once (twice) behind each other one. Behind one that draws little power a kernel
    reads up to 7% faster; a rotated order leaves every provider but one behind the same neighbour.
    """
    first = [(i + 1) // 2 if i % 2 else (providers - i // 2) % providers for i in range(providers)]
    design = [[(place + turn) % providers for place in first] for turn in range(providers)]
    if providers % 2:
        design += [order[::-1] for order in design]
    return [design[turn % len(design)] for turn in range(rounds)] if providers else [[]] * rounds


def seconds_of_a_call(call: Call, calls: int = 5) -> float:
    """After three calls of warm-up, by the host's clock: only to choose a window's length."""
    for _ in range(3):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sustained_window(call: Call, seconds: float, a_call: float, meter: Meter) -> Window:
    """Plays ``call`` for ``seconds``, where one call takes about ``a_call`` seconds."""
    calls = max(4, round(seconds / a_call))
    for _ in range(round(calls * WARM_UP)):
        call()
    clock = stopwatch()
    energy = meter.joules()
    clock.start()
    clocks = []
    for done in range(calls):
        call()
        if done in (calls // 2, calls - 1):  # the queue is full: the GPU is in the window's midst
            clocks.append(meter.sm_clock())
    ms = clock.stop()
    energy = meter.joules() - energy
    return Window(ms / calls, sum(clocks) / len(clocks), energy / calls)


class EventStopwatch:
    """Milliseconds of the device's time, between two CUDA events."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize()

    def start(self) -> None:
        self._start.record()

    def stop(self) -> float:
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


class HostStopwatch:
    """Milliseconds of the host's time, for the CPU implementation."""

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> float:
        return (time.perf_counter() - self._start) * 1e3


def stopwatch() -> EventStopwatch | HostStopwatch:
    return EventStopwatch() if torch.cuda.is_available() else HostStopwatch()


def poison_free_memory(count: int = 4) -> None:
    """Fills the blocks that the allocator will hand out next, so that unwritten outputs show."""
    if not torch.cuda.is_available():
        return
    sizes = [2**exponent for exponent in range(29, 19, -1) for _ in range(count)]
    blocks = [torch.full((size,), POISON, dtype=torch.uint8, device="cuda") for size in sizes]
    synchronize()
    del blocks
