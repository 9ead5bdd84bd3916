"""Times of backward passes, taken in turns with CUDA events.

Under the power limit a kernel runs at the clock that its neighbours leave it, so all providers are
timed in the same rounds, one burst each, and only ratios within one run mean anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dash.cli.providers import Provider
from dash.cli.repeats import poison

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Timed:
    """Attributes: provider; ms of a call in each round; whether its last gradients were finite."""

    provider: Provider
    rounds: list[float]
    finite: bool

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.ms

    def tflops(self, flops: float) -> float:
        return flops / self.ms / 1e9


def time_in_turns(
    providers: list[Provider], rounds: int, burst_ms: float, track: Callable
) -> list[Timed]:
    """Median times over ``rounds`` bursts of about ``burst_ms`` each, the providers in turns.

    Before each burst the memory that its outputs will take is filled with NaN bytes.
    """
    calls = {}
    for provider in providers:
        for _ in range(WARM_UP_CALLS):
            provider.backward()
        calls[provider.name] = max(1, round(burst_ms / _burst(provider, WARM_UP_CALLS)))
    times: dict[str, list[float]] = {provider.name: [] for provider in providers}
    finite = {provider.name: True for provider in providers}
    for _ in track(range(rounds)):
        for provider in providers:
            poison(provider.backward(), 0)
            times[provider.name].append(_burst(provider, calls[provider.name]))
            finite[provider.name] &= all(bool(g.isfinite().all()) for g in provider.backward())
    return [Timed(p, times[p.name], finite[p.name]) for p in providers]


def _burst(provider: Provider, calls: int) -> float:
    """ms of a call, over ``calls`` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        provider.backward()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
