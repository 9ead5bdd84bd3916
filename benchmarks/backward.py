"""Times the backward passes of the grid in one run: interleaved providers, sustained windows.

    python -m benchmarks.backward out.csv                               the whole grid
    python -m benchmarks.backward out.csv --masks causal --head-dims 128 --seqlens 4096,8192
    python -m benchmarks.backward out.csv --providers dash,dash:all     every strategy
    python -m benchmarks.backward out.csv --fa3 .fa3/fa3_baseline.py    FA3 beside them

Every round gives each provider a window, behind another neighbour each time; the median of the
rounds is reported, with everything that a reader needs to place it, one CSV row a provider and
problem. Time needed: problems × providers × rounds × seconds × 1.4. PERFORMANCE.md §5 has the
rules.
"""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.fa3 import Fa3Error, Fa3Worker
from benchmarks.measure import (
    Meter,
    Window,
    seconds_of_a_call,
    sustained_window,
    window_orders,
)
from benchmarks.providers import Prepared, Provider, Unavailable, find_provider, make_tensors
from benchmarks.shapes import SEQLENS, Shape, parse_shape, select_shapes
from dash import _C

console = Console(width=120 if not sys.stdout.isatty() else None)

Windows = dict[str, list[Window]]


class Bench:
    """The providers of a run, and what every row says about it."""

    def __init__(
        self, providers: list[Provider], fa3: list[Fa3Worker], seconds: float, rounds: int
    ) -> None:
        self.providers, self.fa3 = providers, fa3
        self.seconds, self.rounds = seconds, rounds
        self.meter = Meter(torch.cuda.current_device())
        self.facts = {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "driver": self.meter.driver,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "commit": commit(),
        }

    def measure(self, shape: Shape, advance: Callable[[], None]) -> Iterator[dict[str, object]]:
        """CSV rows of one problem."""
        prepared = self._prepare(shape)
        lengths = {name: seconds_of_a_call(p.call) for name, p in prepared.items()}
        windows: Windows = {name: [] for name in prepared}
        windows |= {worker.name: [] for worker in self.fa3 if worker.can_run(shape)}
        workers = {worker.name: worker for worker in self.fa3}
        names = list(windows)
        if not names:
            return
        for order in window_orders(len(names), self.rounds):
            for name in (names[place] for place in order):
                if name in prepared:
                    window = sustained_window(
                        prepared[name].call, self.seconds, lengths[name], self.meter
                    )
                elif (window := fa3_window(workers[name], shape, self.seconds)) is None:
                    continue
                windows[name].append(window)
            advance()
        for name, measured in windows.items():
            if measured:
                yield self._row(shape, name, prepared.get(name), measured)

    def _prepare(self, shape: Shape) -> dict[str, Prepared]:
        tensors, prepared = make_tensors(shape), {}
        for provider in self.providers:
            try:
                prepared[provider.name] = provider.prepare(shape, tensors)
            except Unavailable as reason:
                style = "bold red" if str(reason).startswith("WRONG") else "dim"
                console.print(f"{shape}: {provider.name}: {reason}", style=style)
        return prepared

    def _row(
        self, shape: Shape, name: str, prepared: Prepared | None, windows: list[Window]
    ) -> dict[str, object]:
        ms = statistics.median(w.ms for w in windows)
        return {
            **self.facts,
            "batch": shape.batch,
            "seqlen": shape.seqlen,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "causal": int(shape.causal),
            "provider": name,
            "strategy": prepared.strategy if prepared else "",
            "fingerprint": prepared.fingerprint if prepared else "",
            "ms": round(ms, 4),
            "tflops": round(shape.flops / ms / 1e9, 1),
            "ms_min": round(min(w.ms for w in windows), 4),
            "ms_max": round(max(w.ms for w in windows), 4),
            "sm_mhz": round(statistics.median(w.sm_clock for w in windows), 0),
            "joules": round(statistics.median(w.joules for w in windows), 4),
            "rounds": len(windows),
            "seconds": self.seconds,
        }


def fa3_window(worker: Fa3Worker, shape: Shape, seconds: float) -> Window | None:
    if not worker.can_run(shape):
        return None
    try:
        return worker.window(shape, seconds)
    except Fa3Error as error:
        console.print(str(error), style="yellow")
        return None


def commit() -> str:
    """$DASH_COMMIT, for a copy of a tree; else the short hash of HEAD, + when the tree differs."""
    if told := os.environ.get("DASH_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def main(
    out: Annotated[Path, typer.Argument(help="CSV file; rows are appended.")],
    masks: Annotated[str, typer.Option(help="full,causal or one of them.")] = "full,causal",
    head_dims: Annotated[str, typer.Option(help="64,128 or one of them.")] = "64,128",
    seqlens: Annotated[str, typer.Option()] = ",".join(map(str, SEQLENS)),
    gqa: Annotated[bool, typer.Option(help="Also causal D128 with 32/8 and 28/4 heads.")] = True,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="batch,seqlen,heads,kv_heads,head_dim,causal instead of the grid."),
    ] = None,
    providers: Annotated[
        str, typer.Option(help="dash, dash:STRATEGY, dash:all, fa2_det, fa2_nondet, cudnn_nondet.")
    ] = "dash,cudnn_nondet,fa2_det",
    fa3: Annotated[Path | None, typer.Option(help="tools/fa3_baseline.py, for FA3.")] = None,
    fa3_modes: Annotated[str, typer.Option(help="nondet,det or one of them.")] = "nondet,det",
    seconds: Annotated[float, typer.Option(help="Length of a window.", min=0.01)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Windows of each provider.", min=1)] = 3,
) -> None:
    """Times the backward passes of the grid and appends a CSV row for each."""
    names: list[str] = []
    for name in parts(providers):
        names += [f"dash:{s}" for s in _C.strategies()] if name == "dash:all" else [name]
    head_dim_list = tuple(int(d) for d in parts(head_dims))
    shapes = [parse_shape(text) for text in shape or ()] or select_shapes(
        parts(masks), head_dim_list, tuple(int(s) for s in parts(seqlens)), gqa
    )
    workers = [Fa3Worker(fa3, mode) for mode in parts(fa3_modes)] if fa3 else []
    bench = Bench([find_provider(name) for name in names], workers, seconds, rounds)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", newline="") as file, Progress(console=console) as progress:
        task = progress.add_task("rounds", total=len(shapes) * rounds)
        try:
            for problem in shapes:
                for row in bench.measure(problem, lambda: progress.advance(task)):
                    write_row(file, row)
                    report(problem, row)
        finally:
            for worker in workers:
                worker.close()


def write_row(file: TextIO, row: dict[str, object]) -> None:
    writer = csv.DictWriter(file, row)
    if file.tell() == 0:
        writer.writeheader()
    writer.writerow(row)
    file.flush()


def report(shape: Shape, row: dict[str, object]) -> None:
    console.print(
        f"{shape}: {row['provider']} {row['strategy']} {row['ms']} ms, {row['tflops']} TFLOPS, "
        f"{row['sm_mhz']:.0f} MHz, {row['joules']} J"
    )


if __name__ == "__main__":
    typer.run(main)
