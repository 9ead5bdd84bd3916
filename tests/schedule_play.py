"""Problems counted in tiles, the compiled schedules played on them, and what the mask demands.

Nothing here copies a formula of a schedule.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque

import numpy as np
from hypothesis import strategies as st

from dash import _C

MANY_CTAS = 2**31 - 1
TILES = [(128, 128), (64, 128), (32, 128), (16, 64), (16, 16)]


@st.composite
def problems(draw):
    """Problems of up to about 40 KV tiles: ragged, seqlen_q != seqlen_k, GQA, batch."""
    tile_q, tile_kv = draw(st.sampled_from(TILES))
    tiles = st.integers(1, 40) if draw(st.booleans()) else st.integers(1, 6)

    def length():
        whole = draw(tiles) * tile_kv
        return whole if draw(st.booleans()) else draw(st.integers(1, whole))

    seqlen_k = length()
    kv_heads = draw(st.integers(1, 3))
    return _C.Problem(
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        seqlen_q=seqlen_k if draw(st.booleans()) else length(),
        seqlen_k=seqlen_k,
        causal=draw(st.booleans()),
        tile_q=tile_q,
        tile_kv=tile_kv,
        **draw(windows(seqlen_k)),
    )


def windows(seqlen_k):
    """None two times of three, else of any width up to a little more than the sequence."""
    keys = st.integers(-1, 4) | st.integers(-1, seqlen_k + 2)
    window = st.fixed_dictionaries({"window_left": keys, "window_right": keys})
    return st.one_of(st.just({}), st.just({}), window)


def problem(n, q=2, *, heads=1, kv_heads=None, causal=False, batch=1, seqlen_q=None, **window):
    """`n` KV tiles of 128 keys, `q` q tiles per KV tile."""
    return _C.Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads or heads,
        seqlen_q=seqlen_q or n * 128,
        seqlen_k=n * 128,
        causal=causal,
        tile_q=128 // q,
        tile_kv=128,
        **window,
    )


def accepted(strategy, problem, resident_ctas=MANY_CTAS):
    return _C.why_not(strategy, problem, resident_ctas) is None


def tickets(strategy, problem):
    return [_C.ticket(strategy, problem, t) for t in range(_C.num_tickets(strategy, problem))]


def turns_by_chain(all_tickets):
    """{(batch, kv_head, kv_tile): [(q_tile, turn), …] in visit order}; each chain once."""
    chains = {}
    for ticket in all_tickets:
        for batch, kv_head, kv_tile, rows in ticket:
            assert (batch, kv_head, kv_tile) not in chains, "a chain is one unbroken run"
            chains[batch, kv_head, kv_tile] = rows
    return chains


def visible(problem):
    """The mask as a matrix, ``(seqlen_q, seqlen_k)`` bool, from its definition."""
    row = np.arange(problem.seqlen_q)[:, None] + problem.seqlen_k - problem.seqlen_q
    column = np.arange(problem.seqlen_k)[None, :]
    seen = np.ones((problem.seqlen_q, problem.seqlen_k), dtype=bool)
    if problem.causal:
        seen &= column <= row
    if problem.window_left >= 0:
        seen &= column >= row - problem.window_left
    if problem.window_right >= 0:
        seen &= column <= row + problem.window_right
    return seen


def contributions(problem):
    """``(q_tiles, kv_tiles)`` bool: whether the mask leaves any score of a pair of tiles."""
    seen = visible(problem)
    rows = np.arange(0, problem.seqlen_q, problem.tile_q)
    columns = np.arange(0, problem.seqlen_k, problem.tile_kv)
    return np.logical_or.reduceat(np.logical_or.reduceat(seen, rows, axis=0), columns, axis=1)


def circle_ends(strategy, problem):
    """The first ticket behind the circle of each ticket."""
    count = _C.num_tickets(strategy, problem)
    return [_C.end_of_circle(strategy, problem, ticket) for ticket in range(count)]


def stalls(all_tickets, ends, resident_ctas, *, ahead=0, seed=0, rule=True):
    """Plays the tickets on CTAs as the dealer deals them; returns how many are left unfinished.

    All tickets come from one counter. A CTA plays its tickets one after the other and may take up
    to `ahead` more while it does, but none while the counter is inside the circle of its last one
    (`rule`). A step may run when its q tile's counter shows its turn; a step that may run is never
    disabled. Who takes the next ticket is drawn from `seed`.
    """
    steps = [
        [
            ((batch, kv_head, q_tile), turn)
            for batch, kv_head, _, rows in ticket
            for q_tile, turn in rows
        ]
        for ticket in all_tickets
    ]
    chance = random.Random(seed)
    held = [deque() for _ in range(min(resident_ctas, len(steps)))]
    last = [None] * len(held)
    position = [0] * len(steps)
    counter = defaultdict(int)
    waiting = {}  # (q tile, turn) -> CTA
    taken = finished = 0

    def may_take(cta):
        inside = rule and last[cta] is not None and taken < ends[last[cta]]
        return taken < len(steps) and len(held[cta]) <= ahead and not inside

    def play(cta):  # as far as turns allow; returns CTAs that its adds let go on
        nonlocal finished
        woken = []
        while held[cta]:
            ticket = held[cta][0]
            while position[ticket] < len(steps[ticket]):
                row, turn = steps[ticket][position[ticket]]
                if counter[row] != turn:
                    waiting[row, turn] = cta
                    return woken
                counter[row] += 1
                position[ticket] += 1
                if (other := waiting.pop((row, turn + 1), None)) is not None:
                    woken.append(other)
            held[cta].popleft()
            finished += 1
        return woken

    while takers := [cta for cta in range(len(held)) if may_take(cta)]:
        cta = chance.choice(takers)
        held[cta].append(taken)
        last[cta] = taken
        taken += 1
        runnable = [cta] if len(held[cta]) == 1 else []
        while runnable:
            runnable += play(runnable.pop())
    return len(steps) - finished
