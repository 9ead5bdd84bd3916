"""Plays a schedule on a machine: who computes, adds and waits when, and whether it ever ends."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from dash.schedule.machine import Machine, Memory
from dash.schedule.play import Play, Step


class Timed(NamedTuple):
    """A step as played. ``add_start`` is when its turn had come and its tile was staged."""

    sm: int
    ticket: int
    step: Step
    compute_start: float
    compute_end: float
    staged: float
    add_start: float
    add_end: float
    passed: float


class Blocked(NamedTuple):
    """A step that waits for ever for ``step.turn``; its q tile's counter shows ``counter``."""

    sm: int
    ticket: int
    step: Step
    counter: int


@dataclass
class Run:
    """What happened.

    Attributes:
        time: end of the last add, in cycles; of what was played, if the run is stuck.
        over_ideal: ``time`` over the time of SMs that always compute.
        tickets_of: for each SM, the tickets it played, in order.
        steps: every step with its times, if asked for.
        memory_bytes: read from and written to device memory; 0 without a ``Memory``.
        blocked: the steps that wait for ever; empty if the schedule got through.
    """

    play: Play
    machine: Machine
    time: float = 0.0
    tickets_of: list[list[int]] = field(default_factory=list)
    steps: list[Timed] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    memory_bytes: float = 0.0

    @property
    def over_ideal(self) -> float:
        return self.time / self.machine.ideal(self.play.num_steps, self.play.num_chains)

    @property
    def stuck(self) -> bool:
        return bool(self.blocked)


class _Cta:
    """A resident CTA: the tickets it holds, the first of which it plays."""

    __slots__ = ("clock", "held", "passed", "position", "read_done", "sm", "steps")

    def __init__(self, sm: int, writers: int, buffers: int) -> None:
        self.sm = sm
        self.clock = 0.0  # when the MMA role can go on
        self.held: list[int] = []
        self.steps: list[Step] = []
        self.position = 0
        self.passed = [0.0] * max(writers, 1)  # when each writer passed its last turn on
        self.read_done = [0.0] * buffers  # when each staging buffer could be refilled


class _L2:
    """Which q tiles are in L2, and when what is not will have come from memory."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.tiles: OrderedDict[tuple, None] = OrderedDict()  # the one touched last is last
        self.room = int(memory.l2 // (memory.tile + memory.total))
        self.free = 0.0  # when memory has done all that was asked of it
        self.bytes = 0.0

    def ready(self, asked: float, step: Step, begins_chain: bool) -> float:
        """When all that ``step`` reads is there, if it is asked for at ``asked``."""
        m = self.memory
        moved = m.chain if begins_chain else 0.0
        if step.dq_tile not in self.tiles:
            moved += m.tile + (m.total if step.turn > 0 else 0.0)
            if len(self.tiles) == self.room:
                self.tiles.popitem(last=False)
                moved += m.total
        self.tiles[step.dq_tile] = None
        self.tiles.move_to_end(step.dq_tile)
        if moved == 0.0:
            return asked
        self.bytes += moved
        self.free = max(self.free, asked) + moved / m.pace
        return self.free


def simulate(play: Play, machine: Machine, *, record: bool = False) -> Run:
    """Plays all tickets in order on ``machine.sms`` resident CTAs.

    The heap holds each CTA that can go on, by the time at which it does; a CTA whose step has no
    turn yet waits in ``waiting`` until the step before it is played. Times never run backwards,
    so tickets are taken in the order in which CTAs come for them. Turns that nobody will pass are
    left in ``waiting`` when the heap is empty: the deadlock.

    Args:
        play: what to play.
        machine: where.
        record: keep every step's times, for drawings and traces.
    """
    return _Simulation(play, machine, record).run()


class _Simulation:
    def __init__(self, play: Play, machine: Machine, record: bool) -> None:
        self.play = play
        self.machine = machine
        self.record = record
        self.result = Run(play, machine, tickets_of=[[] for _ in range(machine.sms)])
        self.turns: dict[tuple, tuple[int, float]] = {}  # q tile -> its counter, and since when
        self.waiting: dict[tuple, _Cta] = {}  # (q tile, turn) -> who needs it
        self.ready: list[tuple[float, int, _Cta]] = []
        self.next_ticket = 0
        self.round_robin = machine.deals_round_robin(play.name)
        self.l2 = None if machine.memory is None else _L2(machine.memory)

    def run(self) -> Run:
        for sm in range(self.machine.sms):
            cta = _Cta(sm, self.machine.writers, self.machine.buffers)
            self.ready.append((0.0, sm, cta))
        while self.ready:
            _, _, cta = heapq.heappop(self.ready)
            self._go_on(cta)
        counter = {tile: turn for tile, (turn, _) in self.turns.items()}
        self.result.blocked = [
            Blocked(cta.sm, cta.held[0], cta.steps[cta.position], counter.get(tile, 0))
            for (tile, _), cta in self.waiting.items()
        ]
        if self.l2 is not None:
            self.result.memory_bytes = self.l2.bytes
        return self.result

    def _go_on(self, cta: _Cta) -> None:
        if cta.position == len(cta.steps) and not self._begin_ticket(cta):
            return
        step = cta.steps[cta.position]
        counter, since = self.turns.get(step.dq_tile, (0, 0.0))
        if counter != step.turn:
            self.waiting[step.dq_tile, step.turn] = cta
            return
        self._play(cta, step, since)
        left = len(cta.steps) - cta.position
        if self.machine.ahead:
            self._take_ahead(cta, left)
        # Who holds the next ticket goes on with it; else the last turn must be passed on before.
        at = max(cta.passed) if left == 0 and len(cta.held) == 1 else cta.clock
        heapq.heappush(self.ready, (at, cta.sm, cta))

    def _take_ahead(self, cta: _Cta, left: int) -> None:
        """Short chains: several tickets, until more than ``ahead`` steps are left to begin."""
        left += sum(self.play.steps_of(ticket) for ticket in cta.held[1:])
        while left <= self.machine.ahead and self._take(cta):
            left += self.play.steps_of(cta.held[-1])

    def _take(self, cta: _Cta) -> bool:
        """One more ticket for the CTA to hold; False if there is none."""
        ticket = self.next_ticket
        if self.round_robin:
            played = len(self.result.tickets_of[cta.sm])
            ticket = cta.sm + played * self.machine.sms
        if ticket >= len(self.play.tickets):
            return False
        self.next_ticket += 1
        self.result.tickets_of[cta.sm].append(ticket)
        cta.held.append(ticket)
        return True

    def _begin_ticket(self, cta: _Cta) -> bool:
        """Makes the next ticket the one that the CTA plays; False if there is none."""
        if cta.steps:
            cta.held.pop(0)
            cta.steps = []
        if not cta.held:
            self._take(cta)
            cta.clock = max(cta.clock, *cta.passed)
        if not cta.held:
            return False
        cta.clock += self.machine.ticket_loss
        cta.steps = self.play.steps(cta.held[0])
        cta.position = 0
        return True

    def _play(self, cta: _Cta, step: Step, turn_since: float) -> None:
        m = self.machine
        begins_chain = cta.position == 0 or step.chain is not cta.steps[cta.position - 1].chain
        start = cta.clock + (m.chain_overhead if begins_chain else 0.0)
        writer = cta.position % max(m.writers, 1)
        buffer = cta.position % m.buffers
        end = start + m.compute + m.step_loss
        if self.l2 is not None:  # loads go out while the step before is played
            end = max(end, self.l2.ready(max(0.0, cta.clock - m.compute), step, begins_chain))
        staged = max(end, cta.read_done[buffer])
        seen = max(turn_since, cta.passed[writer]) + m.acquire
        add_start = max(staged, seen)
        add_end = add_start + m.copy
        passed = add_end + m.release
        cta.read_done[buffer] = add_end
        cta.passed[writer] = passed
        cta.clock = add_end if m.writers == 0 else staged
        cta.position += 1
        self.turns[step.dq_tile] = (step.turn + 1, passed)
        self.result.time = max(self.result.time, passed)
        if self.record:
            self.result.steps.append(
                Timed(cta.sm, cta.held[0], step, start, end, staged, add_start, add_end, passed)
            )
        woken = self.waiting.pop((step.dq_tile, step.turn + 1), None)
        if woken is not None:
            heapq.heappush(self.ready, (woken.clock, woken.sm, woken))
