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


class Playing:
    """CTAs that each play the tickets they hold, in the order in which they took them.

    A step may run when its q tile's counter shows its turn; a step that may run is never disabled.
    """

    def __init__(self, all_tickets, ctas):
        self.steps = [
            [
                ((batch, kv_head, q_tile), turn)
                for batch, kv_head, _, rows in ticket
                for q_tile, turn in rows
            ]
            for ticket in all_tickets
        ]
        self.held = [deque() for _ in range(ctas)]
        self.position = [0] * len(self.steps)
        self.counter = defaultdict(int)
        self.waiting = {}  # (q tile, turn) -> CTA
        self.finished = 0

    def give(self, cta, ticket):
        self.held[cta].append(ticket)
        runnable = [cta] if len(self.held[cta]) == 1 else []
        while runnable:
            runnable += self._play(runnable.pop())

    def _play(self, cta):
        """As far as turns allow; returns the CTAs that its adds let go on."""
        woken = []
        while self.held[cta]:
            ticket = self.held[cta][0]
            while self.position[ticket] < len(self.steps[ticket]):
                row, turn = self.steps[ticket][self.position[ticket]]
                if self.counter[row] != turn:
                    self.waiting[row, turn] = cta
                    return woken
                self.counter[row] += 1
                self.position[ticket] += 1
                if (other := self.waiting.pop((row, turn + 1), None)) is not None:
                    woken.append(other)
            self.held[cta].popleft()
            self.finished += 1
        return woken


def stalls(all_tickets, ends, resident_ctas, *, ahead=0, seed=0, rule=True):
    """Plays tickets that are dealt one by one from a counter; returns how many never finish.

    A CTA may take up to `ahead` more while it plays, but none while the counter is inside the
    circle of its last one (`rule`). Who takes the next ticket is drawn from `seed`.
    """
    chance = random.Random(seed)
    ctas = range(min(resident_ctas, len(all_tickets)))
    playing = Playing(all_tickets, len(ctas))
    last = {}

    def may_take(cta, ticket):
        inside = rule and cta in last and ticket < ends[last[cta]]
        return len(playing.held[cta]) <= ahead and not inside

    for ticket in range(len(all_tickets)):
        takers = [cta for cta in ctas if may_take(cta, ticket)]
        if not takers:
            break
        cta = chance.choice(takers)
        last[cta] = ticket
        playing.give(cta, ticket)
    return len(all_tickets) - playing.finished


def squad_stalls(all_tickets, ends, arrived_ctas, *, ahead=0, seed=0):
    """Plays circles that squads of CTAs take from a counter, as some CTAs never arrive.

    Members come for their tickets of a circle at any time and in any order between the squad's
    circles before and after it.
    """
    chance = random.Random(seed)
    firsts = sorted({0, *ends} - {len(all_tickets)})
    size = max(end - first for first, end in ((f, ends[f]) for f in firsts))
    squads = arrived_ctas // size  # complete ones
    playing = Playing(all_tickets, squads * size)
    taken = [[] for _ in range(squads)]  # circles of each squad
    seen = [0] * (squads * size)  # of its squad's circles, by each member
    left = deque(firsts)
    while True:
        ready = [
            cta
            for cta in range(squads * size)
            if len(playing.held[cta]) <= ahead
            and (seen[cta] < len(taken[cta // size]) or (cta % size == 0 and left))
        ]
        if not ready:
            return len(all_tickets) - playing.finished
        cta = chance.choice(ready)
        circles = taken[cta // size]
        if seen[cta] == len(circles):
            circles.append(left.popleft())
        first = circles[seen[cta]]
        seen[cta] += 1
        if first + cta % size < ends[first]:
            playing.give(cta, first + cta % size)
