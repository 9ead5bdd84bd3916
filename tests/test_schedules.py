"""The schedules that the kernel compiles, asked through dash._C (docs/schedules.md, "What holds").

What a schedule must cover comes from the mask itself, and progress is played out with resident CTAs
that take tickets in order.
"""

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st
from schedule_play import (
    MANY_CTAS,
    accepted,
    circle_ends,
    contributions,
    problem,
    problems,
    squad_stalls,
    stalls,
    tickets,
    turns_by_chain,
)

from dash import _C

each_strategy = pytest.mark.parametrize("strategy", _C.strategies())
many_examples = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


# ---- 1, 2, 3 ----------------------------------------------------------------------------------


@each_strategy
@many_examples
@given(problem=problems())
@example(problem=problem(1))
@example(problem=problem(1, causal=True))
@example(problem=problem(132, 2, heads=3))
@example(problem=problem(132, 1, heads=3, causal=True))
@example(problem=problem(65, 1, heads=4, kv_heads=2))
@example(problem=problem(7, 2, heads=6, causal=True))
@example(problem=problem(5, 2, heads=33))  # several blocks of heads, the last one larger
@example(problem=problem(5, 2, heads=34, kv_heads=17, causal=True, batch=3))
@example(problem=problem(70, 1, heads=9, causal=True, seqlen_q=900))
@example(problem=problem(20, 2, heads=3, causal=True, window_left=300))
@example(problem=problem(20, 2, heads=3, window_left=64, window_right=64))
@example(problem=problem(8, 2, seqlen_q=256, window_left=256, window_right=0))  # unseen KV tiles
def test_visits_each_contributing_pair_once_in_gapless_turns(strategy, problem):
    assume(accepted(strategy, problem))
    event("runs")
    chains = turns_by_chain(tickets(strategy, problem))
    seen = contributions(problem)
    visits = Counter()
    turns = defaultdict(list)
    for (batch, kv_head, kv_tile), rows in chains.items():
        for q_tile, turn in rows:
            visits[batch, kv_head, kv_tile, q_tile] += 1
            turns[batch, kv_head, q_tile].append(turn)
    wanted = {
        (batch, kv_head, kv_tile, q_tile)
        for batch in range(problem.batch)
        for kv_head in range(problem.kv_slices)
        for kv_tile in range(problem.kv_tiles)
        for q_tile in range(problem.q_tiles)
        if seen[q_tile, kv_tile]
    }
    assert set(visits) == wanted
    assert set(visits.values()) <= {1}
    assert len(chains) == problem.chains, "every KV tile needs its dK and dV written"
    for (_, _, q_tile), seen in turns.items():
        assert sorted(seen) == list(range(problem.kv_tiles_of(q_tile)))


# ---- 4 ----------------------------------------------------------------------------------------


def smallest_accepted(strategy, problem):
    """The smallest number of resident CTAs that why_not accepts; acceptance only grows with it."""
    low, high = 1, 2 * problem.chains + 2
    assert accepted(strategy, problem, high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if accepted(strategy, problem, middle) else (middle + 1, high)
    return low


@each_strategy
@many_examples
@given(problem=problems(), extra=st.integers(0, 200), seed=st.integers(0, 2**20))
@example(problem=problem(132, 2, heads=3), extra=1, seed=0)
@example(problem=problem(65, 1, heads=4), extra=7, seed=0)
@example(problem=problem(33, 1, heads=5, causal=True), extra=3, seed=0)
@example(problem=problem(5, 2, heads=33), extra=4, seed=0)
@example(problem=problem(5, 2, heads=17, causal=True, batch=3), extra=5, seed=0)
def test_progress_for_exactly_the_resident_ctas_accepted(strategy, problem, extra, seed):
    assume(accepted(strategy, problem))
    event("runs")
    bound = smallest_accepted(strategy, problem)
    assert _C.resident_ctas_needed(strategy, problem) == bound
    all_tickets, ends = tickets(strategy, problem), circle_ends(strategy, problem)
    for resident_ctas in {bound, bound + 1, bound + extra, 132, len(all_tickets)}:
        if resident_ctas >= bound:
            assert accepted(strategy, problem, resident_ctas)
            for ahead in (0, 1, 3):
                assert stalls(all_tickets, ends, resident_ctas, ahead=ahead, seed=seed) == 0
    for resident_ctas in {bound - 1, bound // 2, 1} & set(range(1, bound)):
        assert not accepted(strategy, problem, resident_ctas)
        assert stalls(all_tickets, ends, resident_ctas), "refuses what would have run"


@pytest.mark.parametrize("strategy", ["shift", "symmetric_shift"])
def test_without_the_dealers_rule_a_cyclic_strategy_stalls(strategy):
    """A CTA that takes a second ticket of a circle while it plays the first waits for itself."""
    p = problem(8, heads=4, causal=strategy == "symmetric_shift")
    all_tickets, ends = tickets(strategy, p), circle_ends(strategy, p)
    stalled = [stalls(all_tickets, ends, 9, ahead=1, seed=seed, rule=False) for seed in range(20)]
    assert any(stalled)
    assert not any(stalls(all_tickets, ends, 9, ahead=1, seed=seed) for seed in range(20))


@pytest.mark.parametrize("strategy", ["shift", "symmetric_shift"])
@many_examples
@given(problem=problems(), extra=st.integers(0, 100), seed=st.integers(0, 2**20))
@example(problem=problem(65, 1, heads=4), extra=40, seed=0)  # circles of 33 and 32
def test_squads_get_through_with_any_number_of_ctas_that_makes_one(strategy, problem, extra, seed):
    assume(accepted(strategy, problem))
    arrived = _C.resident_ctas_needed(strategy, problem) + extra
    all_tickets, ends = tickets(strategy, problem), circle_ends(strategy, problem)
    for ahead in (0, 1, 3):
        assert squad_stalls(all_tickets, ends, arrived, ahead=ahead, seed=seed) == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=6),
    causal=st.booleans(),
    window=st.sampled_from(
        [{}, {}, {"window_left": 200}, {"window_left": 100, "window_right": 60}]
    ),
    extra=st.integers(0, 100),
    seed=st.integers(0, 2**20),
)
@example(lengths=[(2048, 2048), (700, 900), (3000, 3000)], causal=False, window={}, extra=0, seed=0)
def test_packs_get_through_with_the_ctas_they_ask_for(lengths, causal, window, extra, seed):
    """Cyclic and acyclic sequences from one counter, by the dealer's rule."""
    call = problem(8, heads=4, causal=causal, **window)
    resident = 132
    pack = [
        (index, one, strategy)
        for index, one, strategy, _ in _C.varlen_order(call, lengths, resident_ctas=resident)
    ]
    all_tickets, ends = [], []
    for index, one, strategy in pack:
        first = len(all_tickets)
        all_tickets += [
            [(index, *chain[1:]) for chain in ticket] for ticket in tickets(strategy, one)
        ]
        ends += [first + end for end in circle_ends(strategy, one)]
    needed = max([1, *(_C.resident_ctas_needed(strategy, one) for _, one, strategy in pack)])
    for ahead in (0, 2):
        assert stalls(all_tickets, ends, needed + extra, ahead=ahead, seed=seed) == 0


@each_strategy
@many_examples
@given(problem=problems())
def test_circles_are_runs_of_tickets_no_longer_than_the_residency_asked_for(strategy, problem):
    assume(accepted(strategy, problem))
    ends = circle_ends(strategy, problem)
    longest = 0
    first = 0
    while first < len(ends):
        end = ends[first]
        assert first < end <= len(ends)
        assert set(ends[first:end]) == {end}
        longest = max(longest, end - first)
        first = end
    assert longest == _C.resident_ctas_needed(strategy, problem)


@each_strategy
@many_examples
@given(problem=problems())
@example(problem=problem(5, 2, heads=33))
@example(problem=problem(5, 2, heads=17, causal=True, batch=3))
def test_acyclic_means_that_every_wait_is_for_a_smaller_ticket(strategy, problem):
    assume(accepted(strategy, problem))
    player = {}
    for index, ticket in enumerate(tickets(strategy, problem)):
        for batch, kv_head, _, rows in ticket:
            for q_tile, turn in rows:
                player[batch, kv_head, q_tile, turn] = index
    backward = all(
        player[batch, kv_head, q_tile, turn - 1] < index
        for (batch, kv_head, q_tile, turn), index in player.items()
        if turn > 0
    )
    if not _C.is_cyclic(strategy):
        assert backward
        assert smallest_accepted(strategy, problem) == 1


# ---- 7 ----------------------------------------------------------------------------------------


@each_strategy
@many_examples
@given(problem=problems(), batch=st.integers(1, 9))
@example(problem=problem(5, heads=6, causal=True), batch=7)
@example(problem=problem(3, heads=10), batch=7)
@example(problem=problem(3, heads=10, causal=True), batch=7)
def test_order_of_a_sequence_does_not_depend_on_the_batch(strategy, problem, batch):
    """SM count and batch independence: turns are asked for without an SM count, and every sequence
    of every batch has the turns and visits that it has alone."""
    assume(accepted(strategy, problem))

    def with_batch(batch):
        names = ("heads", "kv_heads", "seqlen_q", "seqlen_k", "causal", "tile_q", "tile_kv")
        names += ("window_left", "window_right")
        return _C.Problem(batch=batch, **{name: getattr(problem, name) for name in names})

    alone = turns_by_chain(tickets(strategy, with_batch(1)))
    together = turns_by_chain(tickets(strategy, with_batch(batch)))
    assert together == {
        (b, kv_head, kv_tile): rows
        for b in range(batch)
        for (_, kv_head, kv_tile), rows in alone.items()
    }


# ---- the questions themselves -----------------------------------------------------------------


def test_names():
    assert _C.strategies()[:3] == ("ascending", "descending", "spt")
    assert len(set(_C.strategies())) == len(_C.strategies())


@each_strategy
def test_accepts_a_plain_problem_of_one_mask_at_least(strategy):
    plain = [problem(16, heads=4, causal=causal) for causal in (False, True)]
    assert any(accepted(strategy, p, 132) for p in plain)


@each_strategy
def test_refusal_names_the_strategy_and_is_raised_by_ticket(strategy):
    for p in (problem(4), problem(4, causal=True), problem(4, causal=True, seqlen_q=300)):
        if (why := _C.why_not(strategy, p, MANY_CTAS)) is not None:
            assert f"'{strategy}'" in why
            assert "got" in why
            with pytest.raises(ValueError, match="got"):
                _C.ticket(strategy, p, 0)
            with pytest.raises(ValueError, match="got"):
                _C.num_tickets(strategy, p)


def test_bad_arguments_are_named():
    p = problem(4)
    with pytest.raises(ValueError, match=r"strategy must be one of 'ascending'.*'sideways'"):
        _C.num_tickets("sideways", p)
    with pytest.raises(ValueError, match="ticket must be in 0 … 3, got 4"):
        _C.ticket("ascending", p, 4)
    sizes = {
        "batch": 1,
        "heads": 4,
        "kv_heads": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "causal": True,
        "tile_q": 64,
        "tile_kv": 128,
    }
    for name in sizes.keys() - {"causal"}:
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            _C.Problem(**sizes | {name: 0})
    with pytest.raises(ValueError, match=r"heads must be a multiple of kv_heads \(3\), got 4"):
        _C.Problem(**sizes | {"kv_heads": 3})
    with pytest.raises(ValueError, match=r"tile_kv must be a multiple of tile_q \(64\), got 96"):
        _C.Problem(**sizes | {"tile_kv": 96})
    with pytest.raises(TypeError, match="tile_kv"):
        _C.Problem(**{name: size for name, size in sizes.items() if name != "tile_kv"})
    with pytest.raises(TypeError, match="colour"):
        _C.Problem(**sizes, colour=3)
