"""Markdown of block rows, as a CSV file has them: the share of attention, and the gain."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from dash.bench.block_models import BLOCK_MODELS
from dash.bench.rows import places
from dash.bench.tables import TITLES, line, title_of

Case = tuple[str, int, int]  # model, batch, seqlen
RIVALS = ("fa3_det", "fa3_nondet", "fa2_det", "cudnn_nondet")
DERIVED = "~"


def block_markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """A case a line: dash's time, its share of attention, and each rival's time over dash's."""
    rows = list(rows)
    cases: dict[Case, dict[str, list[Mapping[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        case = row["model"], int(row["batch"]), int(row["seqlen"])
        cases[case][row["provider"]].append(row)
    found = {name for by_name in cases.values() for name in by_name}
    rivals = [name for name in RIVALS if name in found]
    assert found <= set(TITLES), found
    head = ["block", "batch x length", "dash, ms", "of which attention", "repeats bitwise"]
    head += [*(f"{title_of(name)} / dash" for name in rivals), "paper, over FA3 det"]
    lines = [line(head), line(["---", *["---:"] * (len(head) - 1)])]
    for (model, batch, seqlen), by_name in cases.items():
        if "dash" not in by_name:
            continue
        ours = median(by_name["dash"], "ms")
        share = f"{median(by_name['dash'], 'share'):.0%}"
        same = "yes" if all(row["bitwise"] == "1" for row in by_name["dash"]) else "**no**"
        cells = [model, f"{batch} x {seqlen}", f"{ours:.2f}", share, same]
        cells += [over(by_name.get(name, []), ours) for name in rivals]
        lines.append(line([*cells, BLOCK_MODELS[model].paper]))
    lines += ["", "Above 1 dash's block is faster, bold where it is not."]
    if any(row["derived"] == "1" for row in rows):
        lines.append(
            f"{DERIVED}: derived, dash's block less dash's backward, plus FA3's, timed alone."
        )
    return "\n".join([*lines, *places(rows)])


def median(rows: list[Mapping[str, str]], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def over(rows: list[Mapping[str, str]], ours: float) -> str:
    if not rows:
        return ""
    ratio = f"{median(rows, 'ms') / ours:.3f}"
    ratio = f"**{ratio}**" if float(ratio) < 1 else ratio
    return (DERIVED if rows[0]["derived"] == "1" else "") + ratio
