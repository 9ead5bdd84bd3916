"""Problems counted in tiles, the compiled schedules played on them, and what the mask demands.

Nothing here copies a formula of a schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque

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
    )


def problem(n, q=2, *, heads=1, kv_heads=None, causal=False, batch=1, seqlen_q=None):
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


def contributes(problem, kv_tile, q_tile):
    """Whether the mask leaves any (row, column) of this pair of tiles, read off the mask itself."""
    last_row = min((q_tile + 1) * problem.tile_q, problem.seqlen_q) - 1
    first_column = kv_tile * problem.tile_kv
    return not problem.causal or first_column <= last_row + problem.seqlen_k - problem.seqlen_q


def stalls(all_tickets, resident_ctas, *, fixed=False):
    """Plays the tickets on CTAs that take them in order, from a counter, and hold each to its end.

    With `fixed`, CTA c of G takes tickets c, c + G, c + 2G, … instead.

    Returns how many tickets are left unfinished, none if the schedule gets through. A step may run
    when its q tile's counter shows its turn. A step that may run is never disabled by another, so
    the outcome does not depend on which runs first: one play decides for every timing.
    """
    steps = [
        [
            ((batch, kv_head, q_tile), turn)
            for batch, kv_head, _, rows in ticket
            for q_tile, turn in rows
        ]
        for ticket in all_tickets
    ]
    position = [0] * len(steps)
    counter = defaultdict(int)
    waiting = {}  # (q tile, turn) -> ticket
    taken = min(resident_ctas, len(steps))
    runnable = deque(range(taken))
    finished = 0
    while runnable:
        ticket = runnable.popleft()
        while position[ticket] < len(steps[ticket]):
            row, turn = steps[ticket][position[ticket]]
            if counter[row] != turn:
                waiting[row, turn] = ticket
                break
            counter[row] += 1
            position[ticket] += 1
            if (woken := waiting.pop((row, turn + 1), None)) is not None:
                runnable.append(woken)
        else:
            finished += 1
            following = ticket + resident_ctas if fixed else taken
            if following < len(steps):
                runnable.append(following)
                taken += 1
    return len(steps) - finished
