"""A schedule as a directed acyclic graph: the paper's model, built with networkx.

Each step is an edge of weight ``compute`` followed by one of weight ``reduce``. The steps of a
chain, and the tickets of an SM, are in series. Edges of weight zero put the adds of each q tile in
turn order. The schedule's time is the longest path.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import networkx as nx

from dash.schedule.play import Play
from dash.schedule.simulate import Run


class Node(NamedTuple):
    """A moment of a step: ``begin`` of its compute, ``reduce`` may begin, ``end`` of its add."""

    ticket: int
    step: int
    moment: str


def fixed_assignment(play: Play, sms: int) -> list[list[int]]:
    """SM ``s`` of ``sms`` plays tickets ``s``, ``s + sms``, …"""
    return [list(range(sm, len(play.tickets), sms)) for sm in range(sms)]


def build(
    play: Play, tickets_of: list[list[int]], *, compute: float = 1.0, reduce: float = 0.0
) -> nx.DiGraph:
    """The graph of a schedule whose SM ``s`` plays ``tickets_of[s]`` in that order.

    Edges carry ``weight`` and ``kind``: compute, reduce, series or turn.
    """
    graph = nx.DiGraph()
    adds: dict[tuple, dict[int, Node]] = {}
    for tickets in tickets_of:
        before = None
        for ticket in tickets:
            for k, step in enumerate(play.steps(ticket)):
                begin, add, end = (Node(ticket, k, moment) for moment in ("begin", "reduce", "end"))
                graph.add_edge(begin, add, weight=compute, kind="compute")
                graph.add_edge(add, end, weight=reduce, kind="reduce")
                if before is not None:
                    graph.add_edge(before, begin, weight=0.0, kind="series")
                adds.setdefault(step.dq_tile, {})[step.turn] = add
                before = end
    for by_turn in adds.values():
        for turn, following in itertools.pairwise(sorted(by_turn)):
            end = by_turn[turn]._replace(moment="end")
            graph.add_edge(end, by_turn[following], weight=0.0, kind="turn")
    return graph


def of_run(run: Run) -> nx.DiGraph:
    """The graph of a simulated run, with the assignment of tickets to SMs that it came to."""
    machine = run.machine
    return build(run.play, run.tickets_of, compute=machine.compute, reduce=machine.copy)


def longest_path(graph: nx.DiGraph) -> float:
    """The schedule's time. Raises networkx.NetworkXUnfeasible where it deadlocks (a cycle)."""
    return nx.dag_longest_path_length(graph, weight="weight")


def critical_path(graph: nx.DiGraph) -> tuple[list[Node], Counter]:
    """A longest path, and how many edges of each kind it takes."""
    path = nx.dag_longest_path(graph, weight="weight")
    return path, Counter(graph.edges[edge]["kind"] for edge in itertools.pairwise(path))


def depths(graph: nx.DiGraph) -> dict[Node, float]:
    """Longest path to each node without the turn edges: when it would happen if nobody waited."""
    depth: dict[Node, float] = {}
    for node in nx.topological_sort(graph):
        depth[node] = max(
            (
                depth[before] + edge["weight"]
                for before, _, edge in graph.in_edges(node, data=True)
                if edge["kind"] != "turn"
            ),
            default=0.0,
        )
    return depth


def lemma_1_violations(graph: nx.DiGraph) -> list[tuple[Node, Node]]:
    """Turn edges (u, v) with depth(u) > depth(v).

    Lemma 1 (DASH): added edges of weight zero leave the longest path of parallel isomorphic chains
    as it is if and only if there is none.
    """
    depth = depths(graph)
    return [
        (u, v)
        for u, v, kind in graph.edges(data="kind")
        if kind == "turn" and depth[u] > depth[v] + 1e-9
    ]
