"""Times providers side by side: in one run, in turns, in sustained windows.

Every round gives each provider a window, behind another neighbour each time; the median of the
rounds is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dash.bench.flash_interface import FA4_MODULE, interface_calls
from dash.bench.inputs import Tensors, make_tensors
from dash.bench.measure import Meter, Window, window_orders
from dash.bench.providers import (
    CallProvider,
    Prepared,
    Provider,
    Unavailable,
    cudnn_calls,
    dash_calls,
    flash_calls,
)
from dash.bench.rows import Row, head_of, measured, provenance
from dash.bench.shapes import Shape
from dash.bench.worker import MODES, WorkerProvider
from dash.extension import extension

ALL_PROVIDERS = (
    "dash",
    "fa3_nondet",
    "fa3_det",
    "fa4_nondet",
    "fa4_det",
    "cudnn_nondet",
    "fa2_det",
)


def find_provider(name: str, meter: Meter) -> Provider:
    """A name of ``ALL_PROVIDERS``, ``fa2_nondet`` or ``dash:STRATEGY``."""
    if name in MODES:
        return WorkerProvider(name)
    kind, _, mode = name.partition("_")
    deterministic = mode == "det"
    if name == "dash" or name.startswith("dash:"):
        strategy = name.partition(":")[2] or "auto"
        return CallProvider(name, True, dash_calls(strategy), meter)
    if mode in ("det", "nondet"):
        if kind == "fa2":
            return CallProvider(name, deterministic, flash_calls(deterministic), meter)
        if kind == "fa4":
            return CallProvider(
                name, deterministic, interface_calls(FA4_MODULE, deterministic), meter
            )
        if name == "cudnn_nondet":
            return CallProvider(name, False, cudnn_calls, meter)
    known = (*ALL_PROVIDERS, "fa2_nondet", "dash:STRATEGY", "dash:all")
    raise ValueError(f"no provider {name!r}; there are {', '.join(known)}")


def find_providers(names: Iterator[str] | list[str], meter: Meter) -> list[Provider]:
    """``dash:all`` stands for each strategy."""
    every: list[str] = []
    for name in names:
        strategies = extension().strategies() if name == "dash:all" else ()
        every += [f"dash:{s}" for s in strategies] or [name]
    return [find_provider(name, meter) for name in every]


@dataclass
class Absent:
    """Which providers had no number, and why: reason → problems, by provider."""

    reasons: dict[str, dict[str, list[Shape]]] = field(default_factory=dict)

    def add(self, provider: str, shape: Shape, reason: object) -> None:
        self.reasons.setdefault(provider, {}).setdefault(str(reason), []).append(shape)

    @property
    def wrong(self) -> bool:
        """Whether a provider's gradients were refused."""
        return any(text.startswith("WRONG") for why in self.reasons.values() for text in why)

    def lines(self, problems: int) -> Iterator[str]:
        for provider, why in self.reasons.items():
            for reason, shapes in why.items():
                everywhere = len(shapes) == problems
                where = "" if everywhere else f" ({', '.join(map(str, shapes))})"
                yield f"{provider}: {reason}{where}"


class Bench:
    """A run: its providers, the length of a window, and what every row says about the machine."""

    def __init__(
        self,
        names: list[str],
        seconds: float,
        rounds: int,
        preset: str = "",
        meter: Meter | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.providers = find_providers(names, self.meter)
        self.seconds, self.rounds, self.preset = seconds, rounds, preset
        self.facts = provenance(self.meter)
        self.absent = Absent()

    def measure(self, shape: Shape, advance: Callable[[], None] = lambda: None) -> Iterator[Row]:
        """Rows of one problem; ``advance`` is called after each round."""
        prepared = self._prepare(shape, make_tensors(shape))
        names = list(prepared)
        windows: dict[str, list[Window]] = {name: [] for name in names}
        for order in window_orders(len(names), self.rounds):
            for name in (names[place] for place in order):
                try:
                    windows[name].append(prepared[name].window(self.seconds))
                except Unavailable as reason:
                    self.absent.add(name, shape, reason)
            advance()
        for name, found in windows.items():
            if found:
                yield self._row(shape, name, prepared[name], found)

    def _prepare(self, shape: Shape, tensors: Tensors) -> dict[str, Prepared]:
        prepared = {}
        for provider in self.providers:
            try:
                prepared[provider.name] = provider.prepare(shape, tensors)
            except Unavailable as reason:
                self.absent.add(provider.name, shape, reason)
        return prepared

    def _row(self, shape: Shape, name: str, prepared: Prepared, windows: list[Window]) -> Row:
        return {
            **self.facts,
            **head_of(shape, self.preset),
            "provider": name,
            "version": prepared.version,
            "strategy": prepared.strategy,
            "fingerprint": prepared.fingerprint,
            **measured(windows, shape.flops, self.seconds),
        }

    def close(self) -> None:
        for provider in self.providers:
            provider.close()
