"""How results look on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.progress import track
from rich.table import Table

from dash.bench.rows import Row
from dash.bench.tables import title_of
from dash.cli.accuracy import Verdict
from dash.cli.conditions import Result
from dash.cli.repeats import Repeats
from dash.plan import Plan

console = Console(highlight=False)


def progress(description: str, on: Console = console) -> Callable[[Iterable], Iterable]:
    """A progress bar around an iterable; it vanishes when done."""
    return lambda items: track(items, description=description, console=on, transient=True)


def mark(good: bool) -> str:
    return "[green]yes[/green]" if good else "[red]NO[/red]"


def print_plan(plan: Plan) -> None:
    console.print(str(plan), markup=False, soft_wrap=True)
    if plan.tickets >= plan.device.resident_ctas:  # else it says how small the problem is
        over = plan.predicted_over_ideal
        console.print(f"simulated: {over:.2f} x the time of SMs that always compute")


def accuracy_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="Largest error against an fp64 reference", title_justify="left")
    for column in ("gradient", "dash", "plain PyTorch", "allowed", "within"):
        table.add_column(column, justify="left" if column == "gradient" else "right")
    for v in verdicts:
        numbers = (f"{x:.2e}" for x in (v.error, v.plain_error, v.allowed))
        table.add_row(v.name, *numbers, mark(v.passed))
    return table


def conditions_table(results: list[Result]) -> Table:
    table = Table(title="Bits under what must not change them", title_justify="left")
    table.add_column("condition")
    table.add_column("calls", justify="right")
    table.add_column("equal", justify="right")
    for result in results:
        if result.skipped:
            table.add_row(result.name, "0", f"left out: {result.skipped}")
            continue
        equal = f"{result.calls - result.different} of {result.calls}"
        colour = "green" if result.passed else "red"
        table.add_row(result.name, str(result.calls), f"[{colour}]{equal}[/{colour}]")
    return table


def repeats_line(repeats: Repeats) -> str:
    equal = repeats.calls - repeats.different
    colour = "green" if repeats.different == 0 else "red"
    return (
        f"[{colour}]{equal} of {repeats.calls} repeats bitwise equal[/{colour}]; "
        f"digest of dq, dk, dv: [bold]{repeats.digest}[/bold]"
    )


def timing_table(rows: list[Row], title: str) -> Table:
    """Time, TFLOPS and speed relative to the first row, which is dash."""
    table = Table(title=f"Backward pass, {title}", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    for column in ("repeats bitwise", "ms", "spread", "TFLOPS", "time / dash"):
        table.add_column(column, justify="right")
    for row in rows:
        promised = not row["provider"].endswith("nondet")
        table.add_row(
            " ".join(filter(None, (title_of(row["provider"]), row["strategy"]))),
            mark(True) if promised else "not promised",
            f"{row['ms']:.3f}",
            f"{(row['ms_max'] - row['ms_min']) / row['ms']:.0%}",
            f"{row['tflops']:.0f}",
            f"{row['ms'] / rows[0]['ms']:.2f}",
        )
    return table
