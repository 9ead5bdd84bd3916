"""All strategies of a problem side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from dash.extension import extension
from dash.schedule.machine import Machine
from dash.schedule.play import Play
from dash.schedule.simulate import simulate
from dash.schedule.slack import Slack, slack


@dataclass(frozen=True)
class Line:
    """A strategy's figures; ``refusal`` instead of them where it may not run."""

    strategy: str
    refusal: str | None = None
    tickets: int = 0
    over_ideal: float = 0.0
    slack: Slack | None = None


def compare(problem: object, machine: Machine, strategies: Iterable[str] = ()) -> list[Line]:
    """Simulates the strategies, all of them by default, in the order of the table in C++."""
    lines = []
    for name in tuple(strategies) or extension().strategies():
        refusal = extension().why_not(name, problem, machine.sms)
        if refusal is not None:
            lines.append(Line(name, refusal=refusal))
            continue
        play = Play.of(name, problem)
        lines.append(
            Line(
                name,
                tickets=len(play.tickets),
                over_ideal=simulate(play, machine).over_ideal,
                slack=slack(play, machine.sms),
            )
        )
    return lines


def render(problem: object, machine: Machine, lines: Iterable[Line]) -> Table:
    """A rich table of ``compare``'s lines."""
    mask = "causal" if problem.causal else "full"
    table = Table(
        title=f"{mask} mask, {problem.kv_tiles} KV tiles, {problem.q_tiles} q tiles, "
        f"{problem.batch * problem.heads} heads on {machine.sms} SMs",
        caption="time over SMs that always compute; slack between turns in steps",
    )
    table.add_column("strategy")
    for name in ("tickets", "time", "least slack", "mean slack", "slack ≤ 1"):
        table.add_column(name, justify="right")
    for line in lines:
        if line.refusal is not None:
            table.add_row(line.strategy, "", "—", "", "", "", style="dim")
            continue
        table.add_row(
            line.strategy,
            str(line.tickets),
            f"{line.over_ideal:.3f}",
            f"{line.slack.least:g}",
            f"{line.slack.mean:.1f}",
            f"{line.slack.tight:.0%}",
        )
    return table
