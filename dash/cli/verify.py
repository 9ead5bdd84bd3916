"""``python -m dash verify``: accuracy, and the same bits under all that must not change them."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import dash
from dash.cli import conditions, problem
from dash.cli.accuracy import Verdict, judge
from dash.cli.conditions import Result, Subject
from dash.cli.problem import Inputs, make_inputs, plans_asked, shape_from_options
from dash.cli.repeats import digest
from dash.cli.report import accuracy_table, conditions_table, console, progress
from dash.device import default_device
from dash.forward import choose_forward
from dash.plan import Plan

Count = Annotated[int, typer.Option(help="Calls that are compared with the first.", min=1)]
Processes = Annotated[int, typer.Option(help="Fresh processes for each strategy.", min=0)]
Packings = Annotated[int, typer.Option(help="Packs with other sequences in between.", min=0)]
Report = Annotated[Path | None, typer.Option("--json", help="File for the report, or - .")]


def verify(
    batch: problem.Batch = 1,
    seqlen: problem.Seqlen = 512,
    seqlen_k: problem.SeqlenK = None,
    heads: problem.Heads = 4,
    kv_heads: problem.KvHeads = None,
    head_dim: problem.HeadDim = 64,
    dtype: problem.DType = "bfloat16",
    causal: problem.Causal = False,
    window_left: problem.WindowLeft = None,
    window_right: problem.WindowRight = None,
    head_dim_v: problem.HeadDimV = None,
    strategy: problem.Strategy = "auto",
    seed: problem.Seed = 0,
    repeats: Count = 100,
    processes: Processes = 2,
    packings: Packings = 3,
    report: Report = None,
) -> None:
    """Checks a problem's gradients: exact enough, and the same bits whatever happens around them.

    Repeats with poisoned memory and beside other work, fresh processes, packed sequences. Ends with
    exit code 1 if anything differs. Equal reports of two machines mean equal bits on both.
    """
    sizes = (batch, seqlen, seqlen_k, heads, kv_heads, head_dim, dtype)
    shape = shape_from_options(*sizes, causal, window_left, window_right, head_dim_v)
    plans = plans_asked(shape, strategy)
    shown = Console(stderr=True, highlight=False) if str(report) == "-" else console
    shown.print(f"{shape}; on {default_device()}")
    inputs = make_inputs(shape, seed)
    records = []
    for plan in plans:
        shown.rule(f"{plan.strategy}, fingerprint {plan.fingerprint}", align="left")
        subject = subject_of(plan, inputs)
        track = progress(plan.strategy, shown)
        results = [
            conditions.repeats(subject, repeats, track),
            conditions.beside_other_work(subject, repeats, track),
            conditions.fresh_processes(subject, processes, track),
            conditions.packings(subject, packings, track, seed),
        ]
        verdicts = judge(inputs, subject.first)
        shown.print(accuracy_table(verdicts))
        shown.print(conditions_table(results))
        shown.print(f"digest of dq, dk, dv: [bold]{digest(subject.first)}[/bold]")
        records.append(record_of(plan, subject, verdicts, results))
    passed = all(record["passed"] for record in records)
    if report is not None:
        text = json.dumps(header(inputs, str(shape), seed) | {"passed": passed, "plans": records})
        typer.echo(text) if str(report) == "-" else report.write_text(text + "\n")
    if not passed:
        raise typer.Exit(1)


def subject_of(plan: Plan, inputs: Inputs) -> Subject:
    """The plan's backward, with its first gradients."""
    order = plan.strategy, plan.group_split
    return Subject(inputs, *order, plan.workspace_bytes, first=inputs.backward(*order))


def header(inputs: Inputs, shape: str, seed: int) -> dict[str, object]:
    """What was verified, and where."""
    device = inputs.q.device
    name = platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    forward = choose_forward(inputs.forward_call())
    return {
        "problem": shape,
        "seed": seed,
        "inputs": str(dash.checksum(inputs.tensors())),
        "forward": forward,
        "dash": dash.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": f"{device.type}: {name}",
        "host": platform.node(),
    }


def record_of(
    plan: Plan, subject: Subject, verdicts: list[Verdict], results: list[Result]
) -> dict[str, object]:
    """One plan's part of the report."""
    return {
        "strategy": plan.strategy,
        "group_split": plan.group_split,
        "fingerprint": plan.fingerprint,
        "gradients": digest(subject.first),
        "accuracy": [asdict(v) | {"passed": v.passed} for v in verdicts],
        "conditions": [asdict(r) | {"passed": r.passed} for r in results],
        "passed": all(v.passed for v in verdicts) and all(r.passed for r in results),
    }
