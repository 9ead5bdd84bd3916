"""What the longest path must be, by hand, for the problems that a formula covers.

``n`` KV tiles, ``m = n·q`` q tiles, ``h`` heads, a step of ``s = compute + reduce``. All formulas
are for square problems whose heads tile the SMs exactly. Derivations: docs/schedules.md.
"""

from __future__ import annotations

from typing import NamedTuple

from dash.extension import extension


class ClosedForm(NamedTuple):
    sms: int
    time: float


def closed_form(strategy: str, problem: object, compute: float, reduce: float) -> ClosedForm | None:
    """The SMs that the formula is for and the time on them; None where there is no formula.

    =================  =====================================  =====================================
    strategy           on n SMs                               where
    =================  =====================================  =====================================
    ascending          h·m·s + (n − 1)·reduce                 both masks: causal idles half of them
    descending         h·(n + 1)·q·s / 2 + (n − 1)·reduce     h even, reduce ≤ compute
    spt                m·s                                    h = 1
    spt, windows       q tiles of the longest chain, · s      h = 1, causal, one q head a chain
    shift              h·m·s                                  one group
    symmetric_shift    h·(n + 1)·q·s / 2                      h and n even
    zigzag             h·(n + 1)·q·s / 2                      h even, one head a block
    staggered, full    h·m·s + (n / h − 1)·reduce             h divides n, one block of heads
    staggered, causal  m·s                                    h = 1
    =================  =====================================  =====================================
    """
    n, m, h = problem.kv_tiles, problem.q_tiles, problem.batch * problem.kv_slices
    if problem.seqlen_q != problem.seqlen_k or problem.seqlen_q % problem.tile_kv or m % n:
        return None
    if problem.windowed:
        return _in_a_band(strategy, problem, h, compute, reduce)
    step = (compute + reduce) * problem.heads_of_chain
    last_turn = (n - 1) * reduce
    abreast = n // h  # KV tiles of a head in flight
    triangle = h * (n + 1) * (m // n) * step / 2
    even = h % 2 == 0
    forms = {
        "ascending": h * m * step + last_turn,
        "descending": triangle + last_turn if even and reduce <= compute else None,
        "spt": m * step if h == 1 else None,
        "shift": h * m * step if n <= 64 and m * problem.heads_of_chain >= 2 * n else None,
        "symmetric_shift": triangle if even and n % 2 == 0 else None,
        "zigzag": triangle if even and problem.kv_slices % 2 == 0 and n > 64 else None,
        "staggered": h * m * step + (abreast - 1) * reduce if _in_one_block(problem, h) else None,
    }
    if problem.causal:
        forms["staggered"] = m * step if h == 1 else None
    time = forms.get(strategy)
    return None if time is None else ClosedForm(n, time)


def _in_a_band(
    strategy: str, problem: object, heads: int, compute: float, reduce: float
) -> ClosedForm | None:
    """A window to the left under the causal mask: chains start q steps apart, nobody waits."""
    starts_apart = problem.causal and problem.heads_of_chain == 1
    if strategy != "spt" or heads != 1 or not starts_apart:
        return None
    longest = max(problem.q_tiles_of(tile) for tile in range(problem.kv_tiles))
    return ClosedForm(problem.kv_tiles, longest * (compute + reduce))


def _in_one_block(problem: object, heads: int) -> bool:
    """Whether heads tile the SMs, and staggered launches tile 0 of all of them, then tile 1, …"""
    n = problem.kv_tiles
    if n == 1 or n % heads:
        return n == heads
    [(batch, kv_head, kv_tile, _)] = extension().ticket("staggered", problem, heads)
    return (batch, kv_head, kv_tile) == (0, 0, 1)


def lower_bound(problem: object, sms: int, compute: float, reduce: float) -> float:
    """No schedule is faster: all the work spread evenly, and the longest chain."""
    rows = [problem.q_tiles_of(i) for i in range(problem.kv_tiles)]
    step = (compute + reduce) * problem.heads_of_chain
    heads = problem.batch * problem.kv_slices
    return max(heads * sum(rows) * step / sms, max(rows) * step)
