"""What staggered promises beyond the properties of every schedule (csrc/schedule/staggered.h)."""

from collections import Counter, defaultdict

import pytest
from schedule_play import accepted, problem, stalls, tickets


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


@pytest.mark.parametrize("seqlen_q", [None, 100, 3000])
@pytest.mark.parametrize("causal", [False, True])
def test_staggered_accepts_every_problem_on_one_cta(seqlen_q, causal):
    for p in (problem(4, causal=causal, seqlen_q=seqlen_q), problem(1, heads=3, causal=causal)):
        assert accepted("staggered", p, 1)
        assert stalls(tickets("staggered", p), 1) == 0
