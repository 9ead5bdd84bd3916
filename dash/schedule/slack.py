"""Slack: how many steps lie between successive turns of a q tile when nobody has to wait.

Handing a turn over takes about a step on the chip (copy, release, acquire), so a schedule runs
freely where the slack is above one, and loses where it is one or less.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from dash.schedule.play import Play


@dataclass(frozen=True)
class Slack:
    """Over all pairs of successive turns, in steps.

    Attributes:
        least, mean: of the slack; negative where a turn is played before the one it follows.
        tight: share of the pairs with a slack of at most one step.
        pairs: how many there are.
    """

    least: float
    mean: float
    tight: float
    pairs: int


def slacks(play: Play, sms: int) -> list[int]:
    """The slack of every pair of successive turns on ``sms`` SMs that never wait."""
    slots: dict[tuple, dict[int, int]] = {}
    free = [(0, sm) for sm in range(sms)]
    for ticket in range(len(play.tickets)):
        at, sm = heapq.heappop(free)
        for slot, step in enumerate(play.steps(ticket), at):
            slots.setdefault(step.dq_tile, {})[step.turn] = slot
            at = slot + 1
        heapq.heappush(free, (at, sm))
    return [
        by_turn[following] - by_turn[turn]
        for by_turn in slots.values()
        for turn, following in itertools.pairwise(sorted(by_turn))
    ]


def slack(play: Play, sms: int) -> Slack:
    """The statistics of ``slacks``; infinite where no q tile has a second turn."""
    found = slacks(play, sms)
    if not found:
        return Slack(float("inf"), float("inf"), 0.0, 0)
    tight = sum(s <= 1 for s in found) / len(found)
    return Slack(min(found), sum(found) / len(found), tight, len(found))
