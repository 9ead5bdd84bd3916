"""What staggered promises beyond the properties of every schedule (csrc/schedule/staggered.h)."""

from collections import Counter, defaultdict

import pytest
from schedule_play import accepted, circle_ends, problem, stalls, tickets

from dash import _C


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (4, 2), (16, 1), (11, 3), (40, 1)])
def test_staggered_launches_long_chains_first_and_few_tiles_of_a_head_abreast(heads, batch, causal):
    """Of the first 128 tickets a head has 128 / 16; more where there are fewer than 16 heads."""
    p = problem(40, heads=heads, causal=causal, batch=batch)
    played = tickets("staggered", p)
    assert all(len(chains) == 1 for chains in played)
    tiles = defaultdict(list)
    for [(b, kv_head, kv_tile, rows)] in played:
        tiles[b, kv_head].append(kv_tile)
        q_tiles = [q_tile for q_tile, _ in rows]
        assert q_tiles == list(reversed(range(p.first_q_tile(kv_tile), p.q_tiles)))
        assert {turn for _, turn in rows} == {kv_tile}
    assert all(order == list(range(p.kv_tiles)) for order in tiles.values())
    first = Counter((b, kv_head) for [(b, kv_head, _, _)] in played[:128])
    assert max(first.values()) == min(p.kv_tiles, 128 // min(16, heads * batch))


@pytest.mark.parametrize(
    ("tiles", "abreast"), [(4, 4), (16, 8), (20, 10), (64, 32), (100, 50), (300, 128)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_staggered_has_half_of_a_heads_tiles_in_flight_with_gqa(tiles, abreast, causal):
    """At least 8 and at most 128 of them, of as many heads as leave each head so many."""
    p = problem(tiles, heads=128, kv_heads=32, causal=causal)
    heads_in_block = 128 // max(abreast, 8)
    first = [_C.ticket("staggered", p, t)[0][:3] for t in range(heads_in_block * abreast)]
    assert first == [
        (0, kv_head, kv_tile) for kv_tile in range(abreast) for kv_head in range(heads_in_block)
    ]


@pytest.mark.parametrize("seqlen_q", [None, 100, 3000])
@pytest.mark.parametrize("causal", [False, True])
def test_staggered_accepts_every_problem_on_one_cta(seqlen_q, causal):
    for p in (problem(4, causal=causal, seqlen_q=seqlen_q), problem(1, heads=3, causal=causal)):
        assert accepted("staggered", p, 1)
        assert stalls(tickets("staggered", p), circle_ends("staggered", p), 1) == 0
