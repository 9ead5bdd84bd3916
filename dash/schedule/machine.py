"""What the simulator assumes about the chip and the kernel, in cycles."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """SMs with one resident CTA each, and the pace of a step and of its ordered add.

    Attributes:
        sms: resident CTAs.
        compute: matrix products of a step.
        copy: the bulk add of a step's dQ tile, until shared memory may be refilled.
        release: from there until another SM can see that the turn was passed on.
        acquire: seeing a turn that was passed on.
        writers: dQ writers that alternate over steps. 0: the MMA role adds the tile itself before
            its next step, as in the paper's model.
        buffers: staged dQ tiles.
        chain_overhead: before the first step of each chain: loading K and V, writing dK and dV.
        step_loss, ticket_loss: what a step and a ticket take beyond that; the ideal has neither.
        ahead: a CTA takes its next ticket as soon as so few steps of its last are left to begin; 0:
            after it has passed on the last turn.
        deal: "counter": CTAs take the next ticket there is; "round robin": CTA c of G takes
            tickets c, c + G, c + 2G, …
    """

    sms: int
    compute: float
    copy: float = 0.0
    release: float = 0.0
    acquire: float = 0.0
    writers: int = 2
    buffers: int = 1
    chain_overhead: float = 0.0
    step_loss: float = 0.0
    ticket_loss: float = 0.0
    ahead: int = 0
    deal: str = "counter"

    def __post_init__(self) -> None:
        if self.sms < 1 or self.writers < 0 or self.buffers < 1 or self.ahead < 0:
            raise ValueError(f"needs sms, buffers ≥ 1 and writers, ahead ≥ 0, got {self}")
        if self.deal not in ("counter", "round robin"):
            raise ValueError(f"deal must be 'counter' or 'round robin', got {self.deal!r}")

    @classmethod
    def paper(cls, sms: int, compute: float = 1.0, reduce: float = 0.0) -> Machine:
        """The model of the paper: compute, then reduce, in series; handing over costs nothing."""
        return cls(sms=sms, compute=compute, copy=reduce, writers=0)

    def with_(self, **changes: object) -> Machine:
        return replace(self, **changes)

    def ideal(self, num_steps: int, num_chains: int) -> float:
        """Time if all SMs always computed."""
        per_step = self.compute + (self.copy if self.writers == 0 else 0.0)
        return (num_steps * per_step + num_chains * self.chain_overhead) / self.sms


# An H200 with all SMs adding 32 KB tiles at once, fitted to measurements of the protocol alone: 4%
# (root mean square) over 130 of them; tests/test_schedule_model.py quotes some. With one SM at work
# the same steps take 430 (acquire), 1,600 (copy) and 1,230 (release) cycles.
H200 = Machine(
    sms=132,
    compute=4000,
    copy=1600,
    release=1700,
    acquire=700,
    writers=2,
    chain_overhead=3000,
    step_loss=180,
    ticket_loss=2300,
)
