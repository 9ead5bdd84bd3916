"""``python -m dash demo``: what dash does, on this machine, in under a minute."""

from __future__ import annotations

import torch
import typer

import dash
from dash.bench.run import Bench
from dash.cli.accuracy import judge
from dash.cli.problem import Shape, bench_shape, make_inputs
from dash.cli.repeats import repeat
from dash.cli.report import (
    accuracy_table,
    console,
    print_plan,
    progress,
    repeats_line,
    timing_table,
)
from dash.cli.runs import play
from dash.device import default_device
from dash.extension import ExtensionMissingError, extension

REPEATS = 20
ROUNDS = 10
SECONDS = 0.05  # of a window
RIVALS = ("cudnn_nondet", "fa2_det")


def demo() -> None:
    """Shows a plan, how exact the gradients are, that they repeat, and how fast they come."""
    device = default_device()
    try:
        on_gpu = extension().HAS_KERNELS and device.type == "cuda"
    except ExtensionMissingError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    where = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    console.print(f"[bold]dash {dash.__version__}[/bold] on {where}, torch {torch.__version__}")
    if not on_gpu:
        console.print(
            "No Hopper GPU with built kernels here, so this is the CPU implementation: the same "
            "plan, walked tile by tile in PyTorch. It shows the order, not the speed."
        )
    device = device if on_gpu else torch.device("cpu")
    as_promised = [_show(_shape(on_gpu, causal), device) for causal in (False, True)]
    if not all(as_promised):
        raise typer.Exit(1)


def _shape(on_gpu: bool, causal: bool) -> Shape:
    if on_gpu:
        return Shape(2, 4096, 4096, 16, 16, 128, torch.bfloat16, causal)
    return Shape(2, 512, 512, 4, 2, 64, torch.bfloat16, causal)


def _show(shape: Shape, device: torch.device) -> bool:
    """One problem: plan, accuracy, repeats, and on a GPU time. True if all is as promised."""
    console.print()
    console.rule(f"[bold]{shape}", align="left")
    plan = dash.plan(shape.q, shape.kv, shape.dtype, causal=shape.causal, device=device)
    print_plan(plan)
    console.print()
    inputs = make_inputs(shape, seed=0, device=device)
    verdicts = judge(inputs, inputs.backward("auto"))
    console.print(accuracy_table(verdicts))
    result = repeat(
        lambda: inputs.backward("auto"), REPEATS, plan.workspace_bytes, progress("repeats")
    )
    console.print(repeats_line(result))
    if device.type == "cuda":
        rows = play(Bench(["dash", *RIVALS], SECONDS, ROUNDS), [bench_shape(shape)], None)
        console.print(timing_table(rows, str(shape)))
    return result.different == 0 and all(v.passed for v in verdicts)
