"""The committed results in README and docs are those of the CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import tables
from dash.bench.presets import PRESETS
from dash.bench.rows import read_rows

PAGE = """before
<!-- results: tflops h200_6178c30.csv dash=dash:shift "groups=full D128" providers=dash -->
old
<!-- end of results -->
after
"""


def test_no_page_and_no_plot_is_stale() -> None:
    stale = [
        p.name for p in tables.pages() if tables.regenerated(p.read_text(), p) != p.read_text()
    ]
    stale += [path.name for path in tables.stale_figures()]
    assert not stale, "run python -m benchmarks.tables"


def test_every_preset_has_its_place() -> None:
    text = (tables.ROOT / "docs" / "benchmarks.md").read_text()
    for name in (*PRESETS, "blocks"):
        assert f" {name}.csv" in text


def test_a_region_is_rewritten_and_the_rest_is_kept() -> None:
    fresh = tables.regenerated(PAGE, Path("x.md"))
    assert fresh != PAGE
    assert "old" not in fresh
    assert fresh.startswith("before\n<!-- results: tflops")
    assert fresh.endswith("<!-- end of results -->\nafter\n")
    assert "| full D128 S4096 | **572** |" in fresh
    assert "causal" not in fresh
    assert tables.regenerated(fresh, Path("x.md")) == fresh


def test_what_is_not_measured_names_its_command() -> None:
    with pytest.raises(ValueError, match="no preset has its name"):
        tables.region("tflops no-such-file.csv", tables.ROOT / "x.md")
    said = tables.not_measured(tables.RESULTS / "gpt-oss.csv")
    assert "python -m dash bench --preset gpt-oss --csv benchmarks/results/gpt-oss.csv" in said
    assert "--block" in tables.not_measured(tables.RESULTS / "blocks.csv")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one page and one CSV file."""
    (tmp_path / "docs").mkdir()
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    rows = (tables.RESULTS / "h200_6178c30_fa3.csv").read_text()
    (results / "paper.csv").write_text(rows)
    page = "<!-- results: {} paper.csv -->\n<!-- end of results -->\n"
    (tmp_path / "docs" / "page.md").write_text("".join(map(page.format, ("tflops", "plots"))))
    (tmp_path / "README.md").write_text("nothing\n")
    for name, path in (
        ("ROOT", tmp_path), ("RESULTS", results), ("FIGURES", tmp_path / "docs" / "figures"),
    ):  # fmt: skip
        monkeypatch.setattr(tables, name, path)
    return tmp_path


def test_the_command_mends_what_the_check_found(copy: Path) -> None:
    pytest.importorskip("matplotlib")
    import typer

    app = typer.Typer()
    app.command()(tables.main)
    run = CliRunner()
    found = run.invoke(app, ["--check"])
    assert found.exit_code == 1
    assert "stale: docs/page.md" in found.output
    assert "stale: benchmarks/results/paper.csv" in found.output
    assert run.invoke(app, []).exit_code == 0
    assert run.invoke(app, ["--check"]).exit_code == 0
    assert "figures/paper/throughput.png" in (copy / "docs" / "page.md").read_text()
    path = copy / "benchmarks" / "results" / "paper.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    found = run.invoke(app, ["--check"])
    assert "stale: benchmarks/results/paper.csv" in found.output  # its plots show another row
    assert len(read_rows(path)) > 10
