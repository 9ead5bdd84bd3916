"""`python -m dash bench` without a GPU: presets, FLOPs, rows, tables and plots."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from dash.bench import rows as bench_rows
from dash.bench.presets import PRESETS, QUICK
from dash.bench.rows import RowFile, read_rows
from dash.bench.run import Absent, Bench
from dash.bench.shapes import (
    Shape,
    from_columns,
    packed_shape,
    read_lengths,
    visible_pairs,
    written_lengths,
)
from dash.bench.tables import markdown, ratios_markdown
from dash.cli import app
from dash.cli.bench import QUICK_SECONDS, packed, provider_names
from dash.cli.runs import play

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "h200_6178c30_fa3.csv"
EVERY = [shape for preset in PRESETS.values() for shape in preset.shapes]


def test_presets_are_those_that_are_documented() -> None:
    assert list(PRESETS) == [
        "paper", "llama3-8b", "qwen2.5-7b", "mixtral-8x7b", "sd3.5", "sam-h", "llada-1b",
        "packed", "packed-d64", "windows", "windows-d64", "gpt-oss", "deepseek-v3",
        "d192-v128", "gemma3",
    ]  # fmt: skip
    said = CliRunner().invoke(app, ["bench", "--preset", "list"])
    assert said.exit_code == 0
    assert all(f"{name} " in said.output for name in PRESETS)
    wrong = CliRunner().invoke(app, ["bench", "--preset", "llama4"])
    assert wrong.exit_code == 2


def test_the_paper_preset_is_the_papers_grid() -> None:
    shapes = PRESETS["paper"].shapes
    assert len(set(shapes)) == 24
    assert {s.batch * s.seqlen for s in shapes} == {16_384}
    assert {s.heads * s.head_dim for s in shapes} == {2048}
    assert {s.seqlen for s in shapes} == {512, 1024, 2048, 4096, 8192, 16_384}


@pytest.mark.parametrize("name", PRESETS)
def test_a_quick_preset_is_short_and_varied(name: str) -> None:
    preset = PRESETS[name]
    quick = preset.quick()
    assert len(quick) == min(QUICK, len(preset.shapes))
    assert set(quick) <= set(preset.shapes)
    groups = len({s.group for s in preset.shapes})
    assert len({s.group for s in quick}) >= min(groups, 2)


def test_quick_asks_for_half_a_minute_of_windows() -> None:
    names = provider_names(None, "auto", quick=True)
    assert names == ["dash", "cudnn_nondet", "fa2_det"]
    assert QUICK_SECONDS <= 30
    assert provider_names("dash,fa3_det", "spt", quick=False) == ["dash:spt", "fa3_det"]
    assert provider_names("dash", "all", quick=False) == ["dash", "dash:all"]


@pytest.mark.parametrize("shape", EVERY, ids=str)
def test_a_csv_row_holds_the_whole_problem(shape: Shape) -> None:
    cells = {name: str(cell) for name, cell in shape.columns().items()}
    assert from_columns(cells) == shape


def test_rows_of_older_files_are_read() -> None:
    shapes = {from_columns(row) for row in read_rows(RESULTS)}
    assert Shape(32, 512, 16, 16, 128, True) in shapes


@pytest.mark.parametrize("lengths", [(), (5,), (7, 7), (8192, *(128,) * 64), (1, 2, 2, 1)])
def test_lengths_are_written_short_and_read_back(lengths: tuple[int, ...]) -> None:
    assert read_lengths(written_lengths(lengths)) == lengths
    assert written_lengths((8192, *(128,) * 64)) == "8192 64x128"


@pytest.mark.parametrize("seqlens", [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, None), (2, 1), (None, 3), (100, 0), (None, None)])
def test_pairs_are_those_of_the_mask(seqlens, causal, window) -> None:
    """Counted cell by cell; but a causal mask alone is half a square, as published."""
    from dash.bench.inputs import visible

    shape = Shape(1, seqlens[0], 1, 1, 8, causal, seqlen_k=seqlens[1], window_left=window[0],
                  window_right=window[1])  # fmt: skip
    counted = int(visible(shape, *seqlens, "cpu").sum())
    pairs = visible_pairs(*seqlens, causal, *window)
    if causal and window == (None, None):
        assert pairs == counted - min(seqlens) / 2
    else:
        assert pairs == counted


@pytest.mark.parametrize(
    ("shape", "gflop"),
    [
        (packed_shape((1024,) * 16, 16, 16, 128, False), 343.6),
        (Shape(2, 8192, 16, 16, 128, True, window_left=1023), 322.1),
        (Shape(4, 4096, 16, 16, 128, True, window_left=127), 42.3),
        (Shape(2, 4096, 16, 16, 192, head_dim_v=128), 893.4),
        (Shape(4, 4096, 8, 8, 256), 1374.4),
    ],
    ids=str,
)
def test_flops_are_those_of_the_measured_table(shape: Shape, gflop: float) -> None:
    assert round(shape.flops / 1e9, 1) == gflop


def test_options_of_one_problem() -> None:
    dense = Shape(2, 4096, 16, 8, 128, True)
    assert packed(dense, "") == dense
    assert packed(dense, "300 2x17") == packed_shape((300, 17, 17), 16, 8, 128, True)
    said = CliRunner().invoke(app, ["bench", "--lengths", "a few"])
    assert said.exit_code == 2
    assert "--lengths" in said.output


def row(shape: Shape, provider: str, ms: float, **more: object) -> dict[str, str]:
    facts = {"time": "2026-12-01T", "gpu": "H", "driver": "1", "cuda": "13", "torch": "2"}
    cells = {**facts, "commit": "abc", **shape.columns(), "provider": provider, "ms": ms, **more}
    return {name: str(cell) for name, cell in cells.items()}


PACKED = packed_shape((37, 211, 1530), 16, 16, 128, True)
DENSE = [Shape(1, s, 16, 16, 128, True) for s in (1024, 2048)]
ROWS = [
    row(PACKED, "dash", 1.0),
    row(PACKED, "fa3_det", 0.9),
    row(PACKED, "fa3_nondet", 2.0),
    *(row(shape, "dash", 1.0) for shape in DENSE),
    *(row(shape, "fa3_nondet", 1.0 + i) for i, shape in enumerate(DENSE)),
    *(row(shape, f"dash:{s}", ms) for shape in DENSE for s, ms in (("spt", 1.0), ("shift", 1.5))),
]


def test_markdown_says_who_wins_and_where_dash_loses() -> None:
    text = markdown(ROWS)
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {PACKED} "))
    flops = PACKED.flops / 1e9
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[0] == f"{flops:.0f}"  # dash: not the fastest
    assert f"**{flops / 0.9:.0f}**" in cells
    assert cells[-2:] == ["2.00", "**0.90**"]
    assert "H, driver 1, CUDA 13, torch 2, commit abc, 2026-12-01" in text
    means = ratios_markdown(ROWS)
    assert "| causal D128 | 1.414 (1.000) |" in means


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dash.bench.plots import plot_all

    written = plot_all(ROWS, tmp_path / "plots")
    names = [path.name for path in written]
    assert names == ["throughput.png", "price_of_determinism.png", "strategies.png"]
    assert all(path.stat().st_size > 10_000 for path in written)
    assert [p.name for p in plot_all(ROWS[:1], tmp_path)] == ["throughput.png"]


def test_a_file_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rows.csv"
    for value in (1, 2):
        file = RowFile(path)
        file.write({"a": value, "b": "x,y"})
        file.close()
    assert [r["a"] for r in read_rows(path)] == ["1", "2"]
    file = RowFile(path)
    with pytest.raises(ValueError, match="no columns"):
        file.write({"a": 1, "c": 2})
    file.close()


def test_a_run_writes_rows_with_their_provenance(tmp_path: Path) -> None:
    """The whole way on the CPU, with dash's own implementation; a rival's absence is said."""
    out = tmp_path / "out.csv"
    shapes = [Shape(1, 64, 2, 1, 64, causal) for causal in (False, True)]
    played = play(Bench(["dash", "cudnn_nondet"], 0.001, 2, "paper"), shapes, out)
    assert len(played) == 2
    with out.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert {*bench_rows.provenance(Bench([], 1, 1).meter)} <= set(first)
    assert first["preset"] == "paper"
    assert [from_columns(r) for r in (first, second)] == shapes
    assert "| full D64 GQA 2/1 S64 |" in markdown([first, second])


def test_absent_ones_are_named_with_the_problems_they_lack() -> None:
    absent = Absent()
    for shape in DENSE:
        absent.add("fa3_det", shape, "no module")
    absent.add("fa2_det", DENSE[0], "WRONG: dq differs")
    assert list(absent.lines(2)) == [
        "fa3_det: no module",
        f"fa2_det: WRONG: dq differs ({DENSE[0]})",
    ]
    assert absent.wrong


def test_commit_is_known_in_a_checkout_only(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DASH_COMMIT", "1234567")
    assert bench_rows.commit() == "1234567"
    monkeypatch.delenv("DASH_COMMIT")
    monkeypatch.setattr(bench_rows.dash, "__file__", str(tmp_path / "dash" / "__init__.py"))
    assert bench_rows.commit() == "unknown"


def test_bench_is_importable_without_the_command_line() -> None:
    import subprocess

    code = "import sys, dash.bench.run, dash.bench.tables; sys.exit('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
