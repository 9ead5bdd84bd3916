"""Draws the figures of docs/schedules.md from the schedules that the kernel compiles.

Run ``python docs/figures/draw.py`` in the repository, with dash built and matplotlib installed.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dash.schedule import H200, Machine, Play, gantt, simulate, square

HERE = Path(__file__).parent
WIDTH = 8.0


def shift_by_hand(problem: object, spacing: int) -> Play:
    """All chains of a head in one group, chain i starting at row i·spacing. The paper's is 1."""
    n, m = problem.kv_tiles, problem.q_tiles

    def rows(i: int) -> list[tuple[int, int]]:
        visits = [(i * spacing + step) % m for step in range(m)]
        return [(j, (min(j // spacing, n - 1) - i) % n) for j in visits]

    tickets = [[(0, head, i, rows(i))] for head in range(problem.heads) for i in range(n)]
    return Play.by_hand("shift", problem, tickets)


def ascending_and_shift() -> None:
    problem = square(6, 1, heads=2)
    machine = Machine.paper(6, 1.0, 0.4)
    panels = [
        ("ascending: everybody wants q tile 0 first", Play.of("ascending", problem)),
        ("shift: chain i begins at row i", shift_by_hand(problem, 1)),
    ]
    _charts("ascending_and_shift", panels, machine)


def slack() -> None:
    problem = square(8, 2, heads=2)
    machine = Machine(sms=8, compute=1.0, copy=0.4, release=0.6, acquire=0.4)
    panels = [
        ("starts one row apart: a hand-off of 1.4 steps is late", 1),
        ("starts two rows apart: it is in time", 2),
    ]
    plays = [(title, shift_by_hand(problem, spacing)) for title, spacing in panels]
    _charts("slack", plays, machine)


def causal() -> None:
    problem = square(6, 1, heads=2, causal=True)
    machine = Machine.paper(6, 1.0, 0.4)
    titles = {
        "ascending": "ascending: half of the machine idles",
        "descending": "descending: common rows first",
        "spt": "spt: short chains first, long ones last",
        "symmetric_shift": "symmetric_shift: each KV tile with its mirror, rectangle shifted",
        "zigzag": "zigzag: spt in one head, its mirror in the next",
    }
    panels = [(title, Play.of(name, problem)) for name, title in titles.items()]
    _charts("causal", panels, machine)


def drift() -> None:
    """On which row each chain of a head is, over time: 16 KV tiles, 8 of them abreast."""
    heads = 16  # of K: with 8 tiles each they fill 128 SMs, and all look alike
    problem = square(16, 2, heads=4 * heads, kv_heads=heads, causal=True)
    machine = Machine.paper(8 * heads)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    colours = colormaps["viridis"].resampled(problem.kv_tiles)
    strategies = ("staggered", "serpentine")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), strategies, strict=True):
        lines: dict[int, list[tuple[float, int]]] = {}
        for timed in simulate(Play.of(name, problem), machine, record=True).steps:
            if timed.step.chain.kv_head == 0:
                line = lines.setdefault(timed.step.chain.kv_tile, [])
                line.append((timed.compute_start / machine.compute, timed.step.dq_tile[2]))
        for kv_tile, line in lines.items():
            axes.plot(*zip(*line, strict=True), color=colours(kv_tile), lw=1.2)
        axes.set_title(name, fontsize=10)
        axes.set(xlabel="time in steps")
    figure.axes[0].set_ylabel("q tile (row)")
    _save(figure, "drift")


def slots() -> None:
    """Who visits which q tile when: rows are KV tiles, columns q tiles, numbers are time slots."""
    problem = square(8, 1, heads=1)
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    panels = [
        ("ascending", Play.of("ascending", problem)),
        ("shift, one group", shift_by_hand(problem, 1)),
        ("shift, two groups", Play.of("shift", problem)),
    ]
    for axes, (title, play) in zip(figure.subplots(1, 3), panels, strict=True):
        _slot_matrix(axes, play)
        axes.set_title(title, fontsize=10)
    _save(figure, "slots")


def launch_order() -> None:
    """Time over ideal for 2,048 chains, q = 2, steps of 4,000 cycles."""
    # Measured on an H200, each head after the other (shift: one group; zigzag: blocks of
    # 2^k heads), by tools/ordered_reduce_skeleton.cu: data/h200_skeleton.csv, two writers.
    measured = {
        "shift": {
            8: 1.157, 16: 1.110, 20: 1.126, 24: 1.098, 32: 1.091, 40: 1.117, 48: 1.108, 64: 1.082,
            96: 1.237, 100: 1.230, 128: 1.077, 132: 1.045,
        },
        "zigzag": {
            8: 1.20, 16: 1.115, 20: 1.26, 24: 1.19, 32: 1.075, 40: 1.26, 48: 1.23, 64: 1.062,
            96: 1.26, 100: 1.17, 128: 1.06, 132: 1.12,
        },
    }  # fmt: skip
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    for axes, (name, times) in zip(
        figure.subplots(1, 2, sharey=True), measured.items(), strict=True
    ):
        predicted = [_predicted(name, n) for n in times]
        axes.plot(
            list(times), list(times.values()), "o:", color="0.5", label="head by head, measured"
        )
        axes.plot(list(times), predicted, "o-", color="C0", label="in blocks, simulated")
        axes.set(xlabel="KV tiles of a head", title=name, ylim=(1.0, 1.3))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time over ideal")
    figure.axes[0].legend(frameon=False, fontsize=9)
    _save(figure, "launch_order")


def _predicted(strategy: str, n: int) -> float:
    heads = 2048 // n
    problem = square(n, 2, heads=heads, causal=strategy == "zigzag")
    return simulate(Play.of(strategy, problem), H200).over_ideal


def _charts(name: str, panels: list[tuple[str, Play]], machine: Machine) -> None:
    figure = Figure(figsize=(WIDTH, 1.75 * len(panels)), layout="constrained")
    runs = [simulate(play, machine, record=True) for _, play in panels]
    last = max(run.time for run in runs) / machine.compute
    for axes, run, (title, _) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], runs, panels, strict=True
    ):
        gantt.draw(run, axes)
        axes.set_title(f"{title} — {run.time / machine.compute:.1f} steps", loc="left", fontsize=10)
        axes.set_xlim(0, last * 1.01)
        axes.set_xticks(range(0, int(last) + 1, 2))
        axes.set_yticks(range(machine.sms))
        axes.set_xlabel("")
    figure.axes[-1].set_xlabel("time in steps")
    _save(figure, name)


def _slot_matrix(axes: Axes, play: Play) -> None:
    n, m = play.problem.kv_tiles, play.problem.q_tiles
    slot = [[0.0] * m for _ in range(n)]
    chains = [chain for ticket in play.tickets for chain in ticket]
    first_of_group = min(chain.rows[0].turn for chain in chains)
    for chain in chains:
        least = min(row.turn for row in chain.rows)
        group = 0 if play.name == "ascending" else least - first_of_group
        for position, row in enumerate(chain.rows):
            slot[chain.kv_tile][row.q_tile] = position + group // (n // 2) * m
            axes.text(
                row.q_tile, chain.kv_tile, str(row.turn), ha="center", va="center", fontsize=8,
                color="white" if slot[chain.kv_tile][row.q_tile] < 0.6 * m else "black",
            )  # fmt: skip
    axes.imshow(slot, cmap="viridis", vmin=0, vmax=m if max(map(max, slot)) < m else 2 * m)
    axes.set(xlabel="q tile", xticks=range(m), yticks=range(n))
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("KV tile (chain)")


def _save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.png", dpi=110)


if __name__ == "__main__":
    for draw in (ascending_and_shift, slack, causal, drift, slots, launch_order):
        draw()
