"""What the simulator assumes about the chip and the kernel, in cycles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dash.extension import extension

KIB = 1024


@dataclass(frozen=True)
class Memory:
    """Device memory behind an L2 that keeps the q tiles touched last.

    A step touches its q tile: Q, dO and the sum of dQ. What L2 has lost comes from memory, and a
    sum that L2 drops goes there; all SMs share the pace. K, V, dK and dV of a chain pass through.

    Attributes:
        l2: bytes of q tiles that L2 keeps.
        pace: bytes a cycle.
        tile: bytes of Q and dO of a q tile.
        total: bytes of its sum.
        chain: bytes of K, V, dK and dV of a KV tile.
    """

    l2: float
    pace: float
    tile: float = 32 * KIB
    total: float = 32 * KIB
    chain: float = 128 * KIB

    def __post_init__(self) -> None:
        if self.l2 < self.tile + self.total or self.pace <= 0:
            raise ValueError(f"needs an L2 of one q tile and a pace > 0, got {self}")


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
        ahead: a CTA takes its next ticket as soon as so few steps of those it holds are left to
            begin; 0: after it has passed on the last turn.
        deal: "counter": CTAs take the next ticket there is; "round robin": CTA c of G takes
            tickets c, c + G, c + 2G, …; "kernel": that for cyclic strategies, else the counter.
        memory: what is behind the SMs; None: whatever a step reads is there in time.
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
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if self.sms < 1 or self.writers < 0 or self.buffers < 1 or self.ahead < 0:
            raise ValueError(f"needs sms, buffers ≥ 1 and writers, ahead ≥ 0, got {self}")
        if self.deal not in ("counter", "round robin", "kernel"):
            raise ValueError(
                f"deal must be 'counter', 'round robin' or 'kernel', got {self.deal!r}"
            )

    @classmethod
    def paper(cls, sms: int, compute: float = 1.0, reduce: float = 0.0) -> Machine:
        """The model of the paper: compute, then reduce, in series; handing over costs nothing."""
        return cls(sms=sms, compute=compute, copy=reduce, writers=0)

    def with_(self, **changes: object) -> Machine:
        return replace(self, **changes)

    def deals_round_robin(self, strategy: str) -> bool:
        """Orders made by hand, which have no strategy's name, count as acyclic."""
        if self.deal != "kernel":
            return self.deal == "round robin"
        return strategy in extension().strategies() and extension().is_cyclic(strategy)

    def ideal(self, num_steps: int, num_chains: int) -> float:
        """Time if all SMs always computed."""
        per_step = self.compute + (self.copy if self.writers == 0 else 0.0)
        return (num_steps * per_step + num_chains * self.chain_overhead) / self.sms


# An H200 with all SMs adding 32 KB tiles at once, fitted to measurements of the protocol alone: 4%
# (root mean square) over 130 of them; tests/test_schedule_model.py quotes some. With one SM at work
# the same steps take 430 (acquire), 1,600 (copy) and 1,230 (release) cycles. Since then the
# kernel's fences have become cheaper (docs/kernel.md, "The ordered reduction"): not fitted.
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

# Fitted to the kernel's times on an H200, causal, GQA (h200_f254b1c.csv: 28/4 heads at 2k, 4k, 8k,
# 32/8 at 2k, 4k; spt, symmetric_shift, zigzag, staggered, each over the best): 5% root mean square,
# 19% without memory. The pace is well determined (8% at 2,400, 11% at 1,800). Of the size these say
# only 20 to 50 MB; but the full mask at 16k, where shift needs 34 MB and lost nothing, says that it
# is no less. The chip has 50 MB and 4.8 TB/s, at 1.7 GHz 2,800 bytes a cycle.
H200_MEMORY = Memory(l2=40 * KIB * KIB, pace=2100)

# An H200 that runs the kernel. Its planner may be four descriptors and two stages ahead, which
# allows 6; 5 fits best: the times of every strategy over the best of the row, causal, a KV head for
# each q head, 512 to 4k (48 of them, from 1.0 to 31), come out within 16% (root mean square of the
# logarithm). With 0 they are off by a factor of 2.7.
H200_KERNEL = H200.with_(ahead=5, deal="kernel", memory=H200_MEMORY)
