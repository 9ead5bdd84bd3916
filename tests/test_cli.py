"""The command line on a machine without a GPU, and the judges it uses."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

import dash
from dash import _C
from dash.bench.providers import deterministic_algorithms
from dash.cli import app
from dash.cli.accuracy import judge
from dash.cli.problem import Shape, make_inputs
from dash.cli.repeats import digest, repeat
from dash.cli.report import timing_table
from dash.device import default_device
from dash.extension import ExtensionMissingError

CPU = torch.device("cpu")
SMALL = Shape(1, 130, 200, 4, 2, 64, torch.bfloat16, causal=True)
without_gpu = pytest.mark.skipif(default_device().type == "cuda", reason="this machine has a GPU")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_doctor_says_what_is_here() -> None:
    code, text = run("doctor")
    assert code == 0
    for what in ("torch", "dash._C", "strategies", "kernels", "nvcc"):
        assert what in text


def test_doctor_runs_where_the_module_is_missing(monkeypatch) -> None:
    def missing() -> None:
        raise ExtensionMissingError("dash._C cannot be loaded")

    # By module: dash.cli.doctor is the command.
    monkeypatch.setattr(sys.modules["dash.cli.doctor"], "extension", missing)
    code, text = run("doctor")
    assert code == 1
    assert "dash cannot run" in text


def python_m_dash(*words: str) -> subprocess.CompletedProcess:
    root = Path(dash.__file__).parent.parent
    command = [sys.executable, "-m", "dash", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_doctor_runs_as_a_module_and_names_the_strategies() -> None:
    done = python_m_dash("doctor")
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.replace(",", " ").split())
    assert words >= set(_C.strategies())


@pytest.mark.parametrize("strategy", ["zigzag", "staggered"])
def test_schedule_prints_a_table_of_one_strategy(strategy: str) -> None:
    problem = ("--mask", "causal", "--kv-tiles", "8")
    done = python_m_dash("schedule", *problem, "--strategy", strategy, "--format", "table")
    assert done.returncode == 0, done.stderr
    assert "causal mask, 8 KV tiles, 16 q tiles" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("│")]
    assert [(row[1], row[3]) for row in rows] == [(strategy, "1024")]
    assert 1 < float(rows[0][5]) < 1.5


def test_schedule_refuses_a_strategy_of_the_other_mask() -> None:
    done = python_m_dash("schedule", "--mask", "full", "--strategy", "zigzag", "--kv-tiles", "8")
    assert "needs a causal mask, got a full mask" in done.stdout
    assert python_m_dash("schedule", "--strategy", "sideways").returncode == 2


@without_gpu
def test_demo_shows_plan_accuracy_and_repeats() -> None:
    code, text = run("demo")
    assert code == 0
    assert "20 of 20 repeats bitwise equal" in text
    for causal in (False, True):
        shape = (2, 512, 4, 64), (2, 512, 2, 64)
        plan = dash.plan(*shape, torch.bfloat16, causal=causal, device="cpu")
        assert plan.fingerprint in text


@without_gpu
def test_bench_refuses_without_a_gpu() -> None:
    code, text = run("bench")
    assert code == 1
    assert "needs a Hopper GPU" in text


RIVALS = ("FA2 det", "cuDNN")


def times_of(text: str) -> dict[str, tuple[float, float]]:
    """Kernel's name to ms and TFLOPS, from a printed timing table."""
    times = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) > 6 and (cells[1] in RIVALS or cells[1].startswith("dash ")):
            times[cells[1]] = float(cells[3]), float(cells[5])
    return times


@pytest.mark.parametrize("strategy", _C.strategies())
def test_the_timing_table_keeps_a_kernels_name_on_one_line(strategy) -> None:
    times = {"ms": 12.345, "ms_min": 12.3, "ms_max": 12.4, "tflops": 678.9}
    rows = [{"provider": "dash", "strategy": strategy}, {"provider": "fa2_det", "strategy": ""}]
    output = Console(width=80, file=io.StringIO())
    output.print(timing_table([row | times for row in rows], str(SMALL)))
    assert times_of(output.file.getvalue()).keys() == {f"dash {strategy}", "FA2 det"}


@pytest.mark.gpu
def test_bench_times_dash_beside_pytorchs_kernels() -> None:
    sizes = ("--seqlen=512", "--heads=4", "--kv-heads=2", "--causal")
    code, text = run("bench", *sizes, "--rounds=2", "--seconds=0.01")
    assert code == 0, text
    times = times_of(text)
    assert times.keys() >= set(RIVALS)
    assert all(ms > 0 and tflops > 0 for ms, tflops in times.values())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_demo_shows_accuracy_repeats_and_time_of_both_masks() -> None:
    code, text = run("demo")
    assert code == 0, text
    assert text.count("20 of 20 repeats bitwise equal") == 2
    assert text.count("│ FA2 det") == text.count("│ cuDNN") == 2
    assert torch.cuda.get_device_name() in text


def test_unsupported_problems_end_with_one_sentence() -> None:
    done = python_m_dash("verify", "--head-dim", "100")
    assert done.returncode == 1
    assert "head_dim 100; required: a multiple of 8" in done.stderr
    assert "Traceback" not in done.stderr


# ---- The judges must be able to say no -----------------------------------------------------------


def test_accuracy_accepts_dash_and_refuses_a_lost_tile() -> None:
    inputs = make_inputs(SMALL, seed=0, device=CPU)
    grads = inputs.backward("auto")
    assert all(verdict.passed for verdict in judge(inputs, grads))
    for i in range(3):
        broken = [g.clone() for g in grads]
        broken[i][:, -64:] = 0
        assert [v.passed for v in judge(inputs, tuple(broken))] == [j != i for j in range(3)]
    for i in range(3):
        broken = [g.clone() for g in grads]
        broken[i][0, 5, 0, 3] = torch.nan
        assert [v.passed for v in judge(inputs, tuple(broken))] == [j != i for j in range(3)]


def test_repeats_sees_one_bit() -> None:
    grads = make_inputs(SMALL, seed=0, device=CPU).backward("auto")
    calls = iter(range(100))

    def sometimes_wrong() -> tuple[torch.Tensor, ...]:
        copies = tuple(g.clone() for g in grads)
        if next(calls) == 3:
            copies[1].view(torch.int16)[0, 0, 0, 0] ^= 1
        return copies

    result = repeat(sometimes_wrong, 5, 64, iter)
    assert (result.calls, result.different) == (5, 1)
    assert result.digest == digest(grads)
    assert digest(tuple(g + 1 for g in grads)) != digest(grads)


@pytest.mark.parametrize("before", [False, True])
def test_pytorch_is_as_deterministic_afterwards_as_before(before: bool) -> None:
    """FA2 is timed with determinism on and memory not filled; an error restores both, too."""

    def fails_inside() -> None:
        with deterministic_algorithms():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
            raise KeyError

    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(before)
    try:
        with pytest.raises(KeyError):
            fails_inside()
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)
