"""Counters of the main kernel by Nsight Compute, as a short table.

    python -m benchmarks.kernel_profile                             causal D128 8k, strategy auto
    python -m benchmarks.kernel_profile --shape 2,8192,16,16,128,0 --strategy shift
    python -m benchmarks.kernel_profile --kernel preprocess
    python -m benchmarks.kernel_profile --report main.ncu-rep       keeps ncu's file

ncu runs this file as its own target (``--play``), leaves the clocks alone, skips the warm-up calls
and profiles one launch of the kernel whose name matches.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dash.bench.shapes import Shape, parse_shape

WARM_UP_CALLS = 3
SECTIONS = (
    "LaunchStats",
    "Occupancy",
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
)
# Asked for by name where this ncu knows them; the sections bring the rest.
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg.per_second",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "lts__xbar2lts_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "lts__d_atomic_input_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
# What the table shows, in this order: a title and the metrics whose names match.
TABLE = (
    ("time and clock", r"gpu__time_duration\.sum$|sm__cycles_elapsed\.avg\.per_second"),
    ("launch", r"launch__(registers_per_thread|grid_size|block_size|shared_mem_\w+_dynamic)$"),
    ("tensor pipe", r"pipe_tensor.*(pct_of_peak|\.sum$)"),
    ("other pipes", r"sm__inst_executed_pipe_(xu|alu|fma\w*|lsu|uniform)\.avg\.pct"),
    ("issue slots", r"sm__inst_issued\.avg\.(pct|per)|smsp__issue_active\.avg\.(pct|per)"),
    ("shared memory, L1", r"l1tex__data_(pipe|bank).*(pct_of_peak|\.sum$)|l1tex__throughput.*pct"),
    ("L2", r"lts__(t_(sectors|bytes)|lts2xbar|xbar2lts|d_atomic|throughput)\S*(pct_\S*|\.sum)$"),
    ("device memory", r"dram__(bytes_(read|write)\.sum|throughput\S*pct\S*)$"),
    ("waits an issue", r"issue_stalled_\w+_per_(warp_active\.pct|issue_active\.ratio)"),
)


def known_metrics(ncu: str) -> list[str]:
    """METRICS that this ncu lists for the chip; it refuses to run for one that it does not know."""
    command = [ncu, "--query-metrics", "--chip", "gh100"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = set(re.findall(r"^\w+__\w+", listed, re.MULTILINE))
    return [m for m in METRICS if m.partition(".")[0] in names]


def profile(ncu: str, shape: str, strategy: str, kernel: str, report: Path | None) -> str:
    """ncu's raw page as CSV: one row of values below names and units."""
    command = [ncu, "--clock-control", "none", "--target-processes", "all"]
    command += ["--kernel-name", f"regex:{kernel}"]
    command += ["--launch-skip", str(WARM_UP_CALLS), "--launch-count", "1"]
    for section in SECTIONS:
        command += ["--section", section]
    if metrics := known_metrics(ncu):
        command += ["--metrics", ",".join(metrics)]
    if report is not None:
        command += ["--export", str(report), "--force-overwrite"]
    target = [sys.executable, "-m", "benchmarks.kernel_profile", "--play"]
    target += ["--shape", shape, "--strategy", strategy]
    page = ["--csv", "--page", "raw"]
    if report is None:
        return output_of([*command, *page, *target])
    output_of([*command, *target])
    return output_of([ncu, "--import", str(report), *page])


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def parse_raw_page(text: str) -> dict[str, tuple[str, str]]:
    """Metric → (value, unit). Lines before the header are the target's and ncu's own."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"no kernel was profiled:\n{text[-3000:]}")
    header, units, values = list(csv.reader(lines[start:]))[:3]
    return {n: (v, u) for n, v, u in zip(header, values, units, strict=True)}


def print_table(metrics: dict[str, tuple[str, str]], title: str) -> None:
    table = Table("what", "metric", "value", "unit", title=title, title_justify="left")
    for what, pattern in TABLE:
        found = [name for name in metrics if re.search(pattern, name)]
        if what.startswith("waits"):  # only what matters, the longest first
            found = sorted(found, key=lambda name: -as_number(metrics[name][0]))[:10]
        for name in found:
            table.add_row(what, name, *metrics[name])
            what = ""
        table.add_section()
    Console(width=150).print(table)


def as_number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def play(shape: Shape, strategy: str) -> None:
    """The target: warm-up calls and the one that is profiled."""
    import torch

    import dash  # noqa: F401  registers the op
    from dash.bench.inputs import make_tensors

    t = make_tensors(shape)
    for _ in range(WARM_UP_CALLS + 1):
        torch.ops.dash.attention_bwd(
            t.dout, t.q, t.k, t.v, t.out, t.lse, None, shape.causal, strategy
        )
    torch.cuda.synchronize()


def main(
    shape: Annotated[
        str, typer.Option(help="batch,seqlen,heads,kv_heads,head_dim,causal.")
    ] = "2,8192,16,16,128,1",
    strategy: Annotated[str, typer.Option()] = "auto",
    kernel: Annotated[str, typer.Option(help="Regular expression.")] = "attention_backward",
    report: Annotated[Path | None, typer.Option(help="Keep ncu's report here.")] = None,
    target: Annotated[bool, typer.Option("--play", hidden=True)] = False,
) -> None:
    """Profiles one launch of a kernel and prints its counters."""
    if target:
        return play(parse_shape(shape), strategy)
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("no ncu on PATH: Nsight Compute comes with the CUDA toolkit")
    metrics = parse_raw_page(profile(ncu, shape, strategy, kernel, report))
    print_table(metrics, f"{kernel}, {parse_shape(shape)}, strategy {strategy}")
    return None


if __name__ == "__main__":
    typer.run(main)
