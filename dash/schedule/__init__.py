"""The schedules as graphs: build, simulate, measure, draw.

    Play.of(strategy, problem)      the steps and turns that the kernel plays
    simulate(play, machine)         when each step is played; finds deadlocks
    slack(play, sms)                steps between successive turns of a q tile
    closed_form(strategy, …)        the time by formula, where there is one
    graph                           networkx: longest path, Lemma 1
    table, gantt, trace             rich, matplotlib and Chrome/Perfetto output

``graph``, ``table`` and ``gantt`` need optional packages and are imported on first use.
"""

import importlib
from types import ModuleType

from dash.schedule.closed_forms import ClosedForm, closed_form, lower_bound
from dash.schedule.machine import H200, H200_KERNEL, H200_MEMORY, Machine, Memory
from dash.schedule.play import Chain, Play, Row, Step, square
from dash.schedule.simulate import Blocked, Run, Timed, simulate
from dash.schedule.slack import Slack, slack, slacks

__all__ = [
    "H200",
    "H200_KERNEL",
    "H200_MEMORY",
    "Blocked",
    "Chain",
    "ClosedForm",
    "Machine",
    "Memory",
    "Play",
    "Row",
    "Run",
    "Slack",
    "Step",
    "Timed",
    "closed_form",
    "lower_bound",
    "simulate",
    "slack",
    "slacks",
    "square",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("gantt", "graph", "table", "trace"):
        return importlib.import_module(f"dash.schedule.{name}")
    raise AttributeError(f"module 'dash.schedule' has no attribute {name!r}")
