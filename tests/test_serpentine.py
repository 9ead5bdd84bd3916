"""What serpentine promises beyond the properties of every schedule (csrc/schedule/serpentine.h)."""

import heapq
from collections import defaultdict
from itertools import groupby

import pytest
from hypothesis import event, example, given, settings
from schedule_play import MANY_CTAS, accepted, circle_ends, problem, problems, stalls, tickets

from dash import _C

CTAS = 128  # and tickets in flight

# Whole rounds of 128 tickets. 28/4, 32/8 and 64/8 heads: the benchmark's shapes, 2k to 16k rows.
whole_rounds = pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "batch"),
    [
        (28, 4, 16, 4),
        (28, 4, 32, 2),
        (28, 4, 64, 1),
        (28, 4, 128, 2),
        (32, 8, 16, 4),
        (32, 8, 64, 1),
        (64, 8, 32, 2),
        (16, 16, 64, 1),
        (32, 1, 64, 4),
    ],
)


def under_the_causal_mask(p):
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "tile_q", "tile_kv")
    return _C.Problem(causal=True, **{name: getattr(p, name) for name in names})


causal_problems = problems().map(under_the_causal_mask)
many_examples = settings(max_examples=100, deadline=None)


def blocks(problem):
    """((upwards, KV tiles), …) of a head: runs of chains that visit their rows the same way.

    Leaves out a chain of one row, which goes neither way. Every head must have the same blocks.
    """
    ways = defaultdict(list)
    for [(batch, kv_head, _, rows)] in tickets("serpentine", problem):
        ways[batch, kv_head] += [rows[0] < rows[-1]] if len(rows) > 1 else []
    [of_a_head] = {
        tuple((upwards, len(list(run))) for upwards, run in groupby(of_head))
        for of_head in ways.values()
    }
    return of_a_head


@many_examples
@given(problem=causal_problems)
@example(problem=problem(40, heads=7, kv_heads=1, causal=True))
@example(problem=problem(40, 1, heads=20, causal=True, batch=2))
@example(problem=problem(17, 4, heads=3, causal=True, seqlen_q=900))
def test_serpentine_takes_kv_tiles_in_order_and_their_rows_down_or_up(problem):
    tiles = defaultdict(list)
    for [(batch, kv_head, kv_tile, rows)] in tickets("serpentine", problem):
        tiles[batch, kv_head].append(kv_tile)
        upwards = list(range(problem.first_q_tile(kv_tile), problem.q_tiles))
        assert [q_tile for q_tile, _ in rows] in (upwards, upwards[::-1])
        assert {turn for _, turn in rows} == {kv_tile}
    assert len(tiles) == problem.batch * problem.kv_slices
    assert all(order == list(range(problem.kv_tiles)) for order in tiles.values())


@many_examples
@given(problem=causal_problems)
@example(problem=problem(19, heads=128, causal=True))
@example(problem=problem(40, heads=7, kv_heads=1, causal=True))
@example(problem=problem(130, heads=8, kv_heads=4, causal=True, batch=2))
def test_serpentine_goes_down_first_and_turns_after_equal_blocks(problem):
    """The last one may be shorter, and none is of a few tiles where the head has many."""
    seen = blocks(problem)
    event(f"{min(len(seen), 4)} blocks")
    if seen:  # not where every chain has one row
        first_upwards, length = seen[0]
        assert not first_upwards
        assert all(other == length for _, other in seen[1:-1])
        assert seen[-1][1] <= length
        assert length >= min(8, problem.kv_tiles // 2)


@pytest.mark.parametrize("kv_heads", [1, 4, 32, 300])
def test_serpentine_goes_up_at_least_once(kv_heads):
    assert all(
        len(blocks(problem(n, heads=kv_heads, causal=True))) >= 2 for n in [*range(2, 20), 64, 129]
    )


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 16, 40])
def test_serpentine_turns_at_the_same_tiles_in_every_batch(kv_heads):
    """The heads of its own sequence decide how many tiles of a head are abreast."""
    alone, *others = (
        blocks(problem(50, heads=kv_heads, causal=True, batch=batch)) for batch in (1, 2, 9)
    )
    assert all(other == alone for other in others)


@whole_rounds
def test_serpentine_turns_after_a_round_of_tickets(heads, kv_heads, n, batch):
    p = problem(n, heads=heads, kv_heads=kv_heads, causal=True, batch=batch)
    upwards = [rows[0] < rows[-1] for [(_, _, _, rows)] in tickets("serpentine", p)]
    rounds = [set(upwards[first : first + CTAS]) for first in range(0, len(upwards), CTAS)]
    assert rounds == [{False}, {True}] * (p.chains // CTAS // 2)


def rows_at_once(strategy, problem):
    """The most rows of a head that a round of tickets is on at one time, if nobody waits.

    A CTA plays a row in a unit of time and takes its next ticket at its chain's end.
    """
    ends = [0] * CTAS
    on = defaultdict(set)
    for ticket, [(batch, kv_head, _, rows)] in enumerate(tickets(strategy, problem)):
        start = heapq.heappop(ends)
        heapq.heappush(ends, start + len(rows))
        for time, (q_tile, _) in enumerate(rows, start):
            on[batch, kv_head, ticket // CTAS, time].add(q_tile)
    return max(len(q_tiles) for q_tiles in on.values())


@whole_rounds
def test_serpentine_has_the_chains_of_a_block_on_one_row(heads, kv_heads, n, batch):
    """A chain that goes up starts on the row to which the others have come, and all end together.

    staggered's start from the last row as far apart as the ones before them ended.
    """
    p = problem(n, heads=heads, kv_heads=kv_heads, causal=True, batch=batch)
    assert rows_at_once("serpentine", p) == 1
    assert rows_at_once("staggered", p) > 1


@pytest.mark.parametrize("seqlen_q", [None, 100, 3000])
def test_serpentine_accepts_every_causal_problem_on_one_cta(seqlen_q):
    for p in (
        problem(5, causal=True, seqlen_q=seqlen_q),
        problem(1, heads=3, causal=True),
        problem(40, heads=28, kv_heads=4, causal=True, batch=2, seqlen_q=seqlen_q),
    ):
        assert accepted("serpentine", p, 1)
        assert stalls(tickets("serpentine", p), circle_ends("serpentine", p), 1) == 0


def test_serpentine_refuses_the_full_mask_as_the_other_causal_strategies_do():
    why = _C.why_not("serpentine", problem(16, heads=4), MANY_CTAS)
    assert "causal" in why
    assert why.replace("serpentine", "zigzag") == _C.why_not("zigzag", problem(16), MANY_CTAS)
