"""The command line. One file a command; the others hold what several commands need."""

from __future__ import annotations

import typer

from dash.cli.bench import bench
from dash.cli.demo import demo
from dash.cli.doctor import doctor
from dash.cli.kernels import kernels
from dash.cli.schedule import schedule
from dash.cli.verify import verify

app = typer.Typer(
    help="The backward pass of attention on Hopper GPUs, bit for bit the same on every run.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(doctor)
app.command()(demo)
app.command()(verify)
app.command()(bench)
app.command()(schedule)
app.command()(kernels)
