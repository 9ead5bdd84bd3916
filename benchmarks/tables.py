"""Writes the committed results into README and docs; a test fails when these are stale.

    python -m benchmarks.tables            rewrites the regions, draws the plots
    python -m benchmarks.tables --check    says which are stale, and changes nothing

A region stands between two comments, and the first says what it shows:

    <!-- results: KIND FILE … OPTIONS -->
    <!-- end of results -->

KIND is ``tflops`` (a problem a line), ``ratios`` (geometric means by group), ``blocks`` (whole
transformer blocks) or ``plots``. FILE is below benchmarks/results; what is not there yet is named
with the command that measures it. OPTIONS: ``groups=a,b`` and ``providers=a,b`` keep only these,
``dash=dash:STRATEGY`` shows that strategy's rows as dash's, for runs without a row of ``auto``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dash.bench.block_tables import block_markdown
from dash.bench.presets import PRESETS
from dash.bench.rows import read_rows
from dash.bench.shapes import from_columns
from dash.bench.tables import markdown, ratios_markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures" / "results"
PAGES = ("README.md", "docs", "benchmarks")
REGION = re.compile(r"(<!-- results: (.*?) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
TABLES = {"tflops": markdown, "ratios": ratios_markdown, "blocks": block_markdown}
SOURCE = "Source"  # the PNG text chunk that holds the digest of the CSV


def pages() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def regenerated(text: str, page: Path) -> str:
    """A page with all its regions as the results are now."""
    return REGION.sub(lambda found: found[1] + region(found[2], page) + found[4], text)


def region(asked: str, page: Path) -> str:
    kind, *words = shlex.split(asked)
    files = [RESULTS / word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    if missing := [path for path in files if not path.exists()]:
        said = "".join(not_measured(path) for path in missing)
        return "" if kind in ("plots", "ratios") else f"{said}\n"  # said once a preset
    if kind == "plots":
        return "".join(image(figure, page) for path in files for figure in figures_of(path))
    if kind not in TABLES:
        raise ValueError(f"{page.name}: no results of kind {kind!r}; there are {list(TABLES)}")
    rows = [row for path in files for row in read_rows(path)]
    return f"\n{TABLES[kind](selected(rows, options))}\n\n"


def not_measured(path: Path) -> str:
    return f"\nNot measured yet: `{command_for(path)}`.\n"


def command_for(path: Path) -> str:
    """What measures ``results/PRESET.csv`` or ``results/blocks.csv``."""
    target = path.relative_to(ROOT)
    if path.stem == "blocks":
        return f"python -m dash bench --block --csv {target}"
    if path.stem in PRESETS:
        return f"python -m dash bench --preset {path.stem} --csv {target}"
    raise ValueError(f"{target} does not exist, and no preset has its name")


def selected(rows: list[dict[str, str]], options: dict[str, str]) -> list[dict[str, str]]:
    groups = options.get("groups", "").split(",") if "groups" in options else None
    providers = options.get("providers", "").split(",") if "providers" in options else None
    shown = []
    for row in rows:
        if row["provider"] == options.get("dash"):
            row = row | {"provider": "dash"}
        if groups is not None and from_columns(row).group not in groups:
            continue
        if providers is None or row["provider"] in providers:
            shown.append(row)
    return shown


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def figures_of(path: Path) -> list[Path]:
    """The committed plots of a CSV file."""
    return sorted((FIGURES / path.stem).glob("*.png"))


def image(figure: Path, page: Path) -> str:
    target = os.path.relpath(figure, page.parent)
    name = figure.stem.replace("_", " ")
    return f"\n![{name}, {figure.parent.name}]({target})\n"


def plotted() -> Iterator[Path]:
    """The CSV files whose plots a page shows."""
    for page in pages():
        for found in REGION.finditer(page.read_text()):
            kind, *words = shlex.split(found[2])
            if kind == "plots":
                yield from (RESULTS / word for word in words if (RESULTS / word).exists())


def stale_figures() -> list[Path]:
    """CSV files whose plots are missing or were drawn from other rows."""
    return [path for path in plotted() if not up_to_date(path)]


def up_to_date(path: Path) -> bool:
    figures = figures_of(path)
    wanted = f"{SOURCE}\0{digest(path)}".encode("latin-1")
    return bool(figures) and all(wanted in figure.read_bytes() for figure in figures)


def draw(path: Path) -> None:
    from dash.bench.plots import plot_all

    for figure in figures_of(path):
        figure.unlink()
    plot_all(read_rows(path), FIGURES / path.stem, {SOURCE: digest(path)})


def main(check: Annotated[bool, typer.Option(help="Change nothing, say what is stale.")] = False):
    """Regenerates every region and plot, or checks them."""
    stale = [str(path.relative_to(ROOT)) for path in stale_figures()]
    if not check:
        for path in stale_figures():
            draw(path)
    for page in pages():
        text = page.read_text()
        fresh = regenerated(text, page)
        if fresh != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(fresh)
    for name in stale:
        typer.echo(f"{'stale' if check else 'rewritten'}: {name}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
