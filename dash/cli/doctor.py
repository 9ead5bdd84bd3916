"""``python -m dash doctor``: what is here, and what is missing for what."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
import typer
from rich.table import Table

import dash
from dash.cli.driver import driver_cuda, fit
from dash.cli.report import console
from dash.device import default_device, is_hopper
from dash.extension import ExtensionMissingError, extension
from dash.forward import fa3_gaps, fa3_package, why_no_fa3


class State(Enum):
    OK = "[green]ok[/green]"
    NOTE = "[yellow]absent[/yellow]"
    BAD = "[red]missing[/red]"


@dataclass(frozen=True)
class Finding:
    """Attributes: what was looked for; how it stands; what was found, or what to do."""

    what: str
    state: State
    text: str


def doctor() -> None:
    """Lists the software, the devices, the toolkit, whether kernels were built, what is missing."""
    findings = [*_software(), *_extension(), *_devices(), *_toolkit(), *_optional()]
    table = Table(title=f"dash {dash.__version__}", title_justify="left")
    for column in ("what", "state", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.state.value, finding.text)
    console.print(table)
    console.print(_verdict(findings))
    if any(f.state is State.BAD for f in findings):
        raise typer.Exit(1)


def _software() -> Iterator[Finding]:
    yield Finding("Python", State.OK, f"{platform.python_version()} on {platform.machine()}")
    yield Finding("torch", State.OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("dash")
        yield Finding(
            "Plotly's dash",
            State.BAD,
            f"{version} is installed too; both are imported as `dash`, and this Python finds "
            f"{dash.__file__}. Keep them in environments of their own",
        )


def _extension() -> Iterator[Finding]:
    try:
        module = extension()
    except ExtensionMissingError as error:
        yield Finding("dash._C", State.BAD, str(error))
        return
    yield Finding("dash._C", State.OK, str(module.__file__))
    yield Finding("strategies", State.OK, ", ".join(module.strategies()))
    if module.HAS_KERNELS:
        yield Finding(
            "kernels", State.OK, "sm_90a; head_dim buckets 64, 128 and 192:128; bf16 and fp16"
        )
        yield _driver(module.CUDA_VERSION)
    else:
        yield Finding("kernels", State.NOTE, "built without nvcc: only the CPU implementation runs")


def _driver(built_with: str) -> Finding:
    driver = driver_cuda()
    if driver is None:
        text = f"none here; the kernels were built with CUDA {built_with}"
        return Finding("driver", State.NOTE, text)
    fits = fit(built_with, driver)
    return Finding("driver", State.OK if fits.good else State.BAD, fits.text)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", State.NOTE, "torch sees no CUDA device: the CPU implementation runs")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        text = f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs"
        fits = is_hopper(index)
        more = "" if fits else "; the kernels need compute capability 9.0"
        yield Finding(f"GPU {index}", State.OK if fits else State.NOTE, text + more)


def _toolkit() -> Iterator[Finding]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        yield Finding("nvcc", State.NOTE, "not on PATH; only a build of the kernels needs it")
        return
    words = [nvcc, "--version"]
    version = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    release = next((word.strip(",") for word in version if word.startswith("V")), "unknown version")
    yield Finding("nvcc", State.OK, f"{release} at {nvcc}")


def _optional() -> Iterator[Finding]:
    if fa3_package() is not None:
        yield Finding("FlashAttention-3", State.OK, "dash.attention's forward uses it")
        device = default_device()
        for gap in fa3_gaps(device) if device.type == "cuda" else ():
            yield Finding("FlashAttention-3", State.NOTE, f"{gap}; another forward is taken")
    else:
        text = f"{why_no_fa3()}: dash.attention's forward uses PyTorch's kernels"
        yield Finding("FlashAttention-3", State.NOTE, text)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if cudnn is not None:
        yield Finding("cuDNN", State.OK, str(cudnn))
    for package in ("networkx", "matplotlib"):
        found = importlib.util.find_spec(package) is not None
        text = "installed" if found else "python -m dash schedule draws with it"
        yield Finding(package, State.OK if found else State.NOTE, text)


def _verdict(findings: list[Finding]) -> str:
    state = {f.what: f.state for f in findings}
    if state["dash._C"] is not State.OK:
        return "[red]dash cannot run:[/red] its module is missing."
    if state.get("driver") is State.BAD:
        return "[red]dash cannot run its kernels:[/red] they do not fit the driver."
    hopper = any(f.what.startswith("GPU ") and f.state is State.OK for f in findings)
    if hopper and state["kernels"] is State.OK:
        return "[green]dash runs its kernels here.[/green]"
    missing = [] if hopper else ["a Hopper GPU"]
    missing += [] if state["kernels"] is State.OK else ["built kernels"]
    return f"dash runs its CPU implementation here; the kernels need {' and '.join(missing)}."
