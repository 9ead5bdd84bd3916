"""The graph of a schedule: closed forms and Lemma 1 (docs/schedules.md, "What holds", 5 and 6)."""

import pytest

from dash import _C
from dash.schedule import Machine, Play, closed_form, lower_bound, simulate, square

graph = pytest.importorskip("dash.schedule.graph", reason="needs networkx")


def problem_of(n, q, heads, causal, **rest):
    return square(n, q, heads=heads, causal=causal, **rest)


# ---- closed forms: SCHEDULES.md §4, property 5 --------------------------------------------

COVERED = [
    ("ascending", False),
    ("ascending", True),
    ("descending", True),
    ("spt", True),
    ("shift", False),
    ("symmetric_shift", True),
    ("staggered", False),
    ("staggered", True),
]


SIZES = [
    (strategy, causal, n, q, heads)
    for strategy, causal in COVERED
    for n in (2, 3, 6, 8)
    for q in (1, 2, 4)
    for heads in (1, 2, 4)
    if closed_form(strategy, problem_of(n, q, heads, causal), 1, 1) is not None
]


@pytest.mark.parametrize("window_left", [0, 1, 127, 128, 300, 500])
@pytest.mark.parametrize("q", [1, 2, 4])
@pytest.mark.parametrize("n", [4, 7, 12])
def test_nobody_waits_in_the_band(n, q, window_left):
    """spt under a window: the longest chain, however many there are; ascending adds against it."""
    problem = problem_of(n, q, 1, True, window_left=window_left)
    for compute, reduce in [(3, 1), (5, 5)]:
        form = closed_form("spt", problem, compute, reduce)
        run = simulate(Play.of("spt", problem), Machine.paper(form.sms, compute, reduce))
        assert run.time == pytest.approx(form.time, rel=1e-12)
        assert graph.longest_path(graph.of_run(run)) == pytest.approx(form.time, rel=1e-12)
        assert form.time >= lower_bound(problem, form.sms, compute, reduce) * (1 - 1e-12)
    ascending = simulate(Play.of("ascending", problem), Machine.paper(n, 3, 1))
    assert ascending.time > closed_form("spt", problem, 3, 1).time or window_left < 2
    for other in ("ascending", "descending", "zigzag", "staggered"):
        assert closed_form(other, problem, 3, 1) is None


@pytest.mark.parametrize(("strategy", "causal", "n", "q", "heads"), SIZES)
def test_longest_path_is_the_closed_form(strategy, causal, n, q, heads):
    problem = problem_of(n, q, heads, causal)
    play = Play.of(strategy, problem)
    for compute, reduce in [(1, 0), (3, 1), (5, 5), (7, 0.5)]:
        form = closed_form(strategy, problem, compute, reduce)
        run = simulate(play, Machine.paper(form.sms, compute, reduce))
        assert graph.longest_path(graph.of_run(run)) == pytest.approx(form.time, rel=1e-12)
        assert run.time == pytest.approx(form.time, rel=1e-12)
        assert form.time >= lower_bound(problem, form.sms, compute, reduce) * (1 - 1e-12)


def test_zigzag_meets_the_bound_of_the_causal_mask():
    problem = problem_of(66, 1, 2, True)
    form = closed_form("zigzag", problem, 3, 1)
    run = simulate(Play.of("zigzag", problem), Machine.paper(form.sms, 3, 1))
    assert run.time == form.time == lower_bound(problem, form.sms, 3, 1)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_staggered_waits_once_for_the_tiles_of_a_head_in_flight(heads):
    problem = problem_of(16, 2, heads, False)
    form = closed_form("staggered", problem, 3, 1)
    run = simulate(Play.of("staggered", problem), Machine.paper(form.sms, 3, 1))
    bound = lower_bound(problem, form.sms, 3, 1)
    assert run.time == form.time == bound + (16 // heads - 1)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "heads"), [(16, 4), (16, 16), (32, 8), (32, 16), (48, 16), (64, 2), (64, 8), (64, 16)]
)
def test_staggereds_form_holds_with_gqa_or_is_not_given(n, heads, group):
    """With GQA a block has fewer heads: two blocks have two staircases."""
    problem = square(n, 2, heads=group * heads, kv_heads=heads, causal=False)
    form = closed_form("staggered", problem, 3, 1)
    one_block = group == 1 or heads * max(8, n // 2) < 256
    assert (form is not None) == one_block
    if one_block:
        run = simulate(Play.of("staggered", problem), Machine.paper(form.sms, 3, 1))
        assert run.time == form.time


@pytest.mark.parametrize(
    ("strategy", "causal", "heads"), [("shift", False, 3), ("symmetric_shift", True, 4)]
)
def test_shifts_are_optimal_where_heads_tile_the_chip(strategy, causal, heads):
    problem = problem_of(8, 2, heads, causal)
    form = closed_form(strategy, problem, 3, 1)
    assert form.time == lower_bound(problem, form.sms, 3, 1)


# ---- Lemma 1: property 6 ------------------------------------------------------------------


def lockstep(strategy, problem):
    """The graph with as many SMs as a head has tickets, each playing its place in every head."""
    play = Play.of(strategy, problem)
    heads = problem.batch * problem.kv_slices
    assignment = graph.fixed_assignment(play, len(play.tickets) // heads)
    return graph.build(play, assignment, compute=3, reduce=1)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("q", [2, 4])
def test_lemma_1_holds_for_shift(n, q):
    built = lockstep("shift", problem_of(n, q, 3, False))
    assert graph.lemma_1_violations(built) == []
    assert graph.longest_path(built) == max(graph.depths(built).values())


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("q", [1, 2, 4])
@pytest.mark.parametrize("missing", [0, 1, 100, 127])
def test_lemma_1_holds_for_symmetric_shift_even_ragged(n, q, missing):
    problem = _C.Problem(
        batch=1,
        heads=2,
        kv_heads=2,
        seqlen_q=n * 128 - missing,
        seqlen_k=n * 128 - missing,
        causal=True,
        tile_q=128 // q,
        tile_kv=128,
    )
    built = lockstep("symmetric_shift", problem)
    # Heads follow each other on the same SMs; a ragged head ends unevenly, so look at one only.
    first_head = [v for v in built if v.ticket < (n + 1) // 2]
    alone = built.subgraph(first_head)
    assert graph.lemma_1_violations(alone) == []
    assert graph.longest_path(alone) == max(graph.depths(alone).values())


def test_lemma_1_fails_for_ascending_and_its_path_is_longer():
    built = lockstep("ascending", problem_of(6, 1, 1, False))
    assert graph.lemma_1_violations(built)
    assert graph.longest_path(built) > max(graph.depths(built).values())
