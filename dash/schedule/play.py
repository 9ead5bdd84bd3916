"""A schedule written out: which ticket plays which steps, with the turn of each.

The numbers come from the C++ policies that the kernel compiles, through ``dash._C``. A ``Play`` can
also be made by hand, to try an order that no policy has yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dash.extension import extension


class Row(NamedTuple):
    q_tile: int
    turn: int


class Chain(NamedTuple):
    """One KV tile's run over its rows; with GQA each row is played by every q head of the group."""

    batch: int
    kv_head: int
    kv_tile: int
    rows: Sequence[Row]


class Step(NamedTuple):
    """One q tile of one q head: the unit of time, and of the ordered sum."""

    chain: Chain
    dq_tile: tuple[int, int, int]  # (batch, q head, q tile)
    turn: int


@dataclass(frozen=True)
class Play:
    """Tickets in launch order, each a tuple of chains in the order played.

    Attributes:
        name: the strategy's name, or any other.
        problem: a ``dash._C.Problem``.
        tickets: the chains of each ticket.
    """

    name: str
    problem: object
    tickets: tuple[tuple[Chain, ...], ...]

    @classmethod
    def of(cls, strategy: str, problem: object) -> Play:
        """The schedule that the kernel plays. Raises ValueError if the strategy refuses it."""
        tickets = (
            extension().ticket(strategy, problem, ticket)
            for ticket in range(extension().num_tickets(strategy, problem))
        )
        return cls.by_hand(strategy, problem, tickets)

    @classmethod
    def by_hand(cls, name: str, problem: object, tickets: Iterable[Iterable[tuple]]) -> Play:
        """From ``(batch, kv_head, kv_tile, [(q_tile, turn), …])`` of each chain of each ticket."""
        return cls(
            name,
            problem,
            tuple(
                tuple(
                    Chain(batch, kv_head, kv_tile, tuple(Row(*row) for row in rows))
                    for batch, kv_head, kv_tile, rows in chains
                )
                for chains in tickets
            ),
        )

    def steps(self, ticket: int) -> list[Step]:
        """The ticket's steps in the order played, q heads of a group innermost."""
        group = self.problem.heads_of_chain
        return [
            Step(chain, (chain.batch, chain.kv_head * group + member, row.q_tile), row.turn)
            for chain in self.tickets[ticket]
            for row in chain.rows
            for member in range(group)
        ]

    def steps_of(self, ticket: int) -> int:
        """How many steps the ticket has."""
        return sum(len(chain.rows) for chain in self.tickets[ticket]) * self.problem.heads_of_chain

    @cached_property
    def num_steps(self) -> int:
        return sum(map(self.steps_of, range(len(self.tickets))))

    @cached_property
    def num_chains(self) -> int:
        return sum(len(chains) for chains in self.tickets)


def square(
    kv_tiles: int,
    q: int = 2,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    causal: bool = False,
    batch: int = 1,
    **window: int,
) -> object:
    """A ``dash._C.Problem`` of ``kv_tiles`` KV tiles with ``q`` q tiles each.

    ``window`` may hold ``window_left`` and ``window_right``, in keys.
    """
    tile_kv = 128
    return extension().Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads or heads,
        seqlen_q=kv_tiles * tile_kv,
        seqlen_k=kv_tiles * tile_kv,
        causal=causal,
        tile_q=tile_kv // q,
        tile_kv=tile_kv,
        **window,
    )
