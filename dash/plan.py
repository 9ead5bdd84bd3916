"""Plans: what a backward pass will do, known before anything runs.

A plan is a pure function of the problem and the device model. Its fingerprint names the order of
every floating-point addition that the schedule decides, and belongs in a training log next to the
seed: equal fingerprints and equal inputs give equal bits, on every GPU that dash runs on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dash.auto import choose
from dash.device import DeviceModel, device_model, dtype_name, planned_device
from dash.extension import extension
from dash.fingerprint import fingerprint
from dash.forward import KNOWN, planned_forward
from dash.problem import Problem
from dash.support import UnsupportedError, problem_reasons, strategy_reason

if TYPE_CHECKING:
    from dash.varlen.plan import VarlenPlan


@dataclass(frozen=True)
class Plan:
    """What ``torch.ops.dash.attention_bwd`` will do for one problem on one device.

    Plain values only: plans can be hashed, pickled and sent to other ranks.

    Attributes:
        strategy: the schedule that will run.
        why: one sentence: asked for, or which rule of ``auto`` chose it.
        refusals: (strategy, sentence) for each that may not run, and why not.
        alternatives: the other strategies that could run.
        group_split: parts into which the q heads of a KV head are cut; each has chains of its own,
            whose dK and dV are added in the order of the parts. 1: whole groups.
        tile_q, tile_kv: query rows a step and key rows a chain.
        chains: KV tiles over all batches, kv heads and parts; each has dK and dV in registers.
        tickets: units of launch, taken in order from a counter.
        grid: CTAs launched. It changes the time, never the bits.
        cyclic: chains wait for each other in both directions.
        workspace_bytes: device memory beyond the outputs.
        problem: what was asked for.
        device: the device model that the plan was made for.
        forward: what ``dash.attention`` would take for out and lse; no part of the fingerprint.
            None where the plan is for no device in particular.
    """

    strategy: str
    why: str
    refusals: tuple[tuple[str, str], ...]
    alternatives: tuple[str, ...]
    group_split: int
    tile_q: int
    tile_kv: int
    chains: int
    tickets: int
    grid: int
    cyclic: bool
    workspace_bytes: int
    problem: Problem
    device: DeviceModel
    forward: str | None = None

    @property
    def q_shape(self) -> tuple[int, ...]:
        """``(batch, seqlen_q, heads, head_dim)``."""
        return self.problem.q_shape

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """``(batch, seqlen_k, kv_heads, head_dim)``, of k."""
        return self.problem.kv_shape

    @property
    def head_dim_v(self) -> int:
        """Of v, out and dout."""
        return self.problem.head_dims[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype

    @property
    def causal(self) -> bool:
        return self.problem.causal

    @property
    def reasons(self) -> dict[str, str]:
        """For each strategy not taken, a sentence that says why not."""
        could = f"could run; {self.strategy} was taken ({self.why})"
        return dict(self.refusals) | dict.fromkeys(self.alternatives, could)

    @property
    def tile_shape(self) -> tuple[int, int]:
        """``(tile_q, tile_kv)``."""
        return self.tile_q, self.tile_kv

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the accumulation order of one sequence's gradients.

        Independent of the batch size and the device; see ``docs/determinism.md``. Computed on
        first use: it reads the whole schedule of one sequence.
        """
        return fingerprint(self.strategy, self.group_split, _order_of_one(self.problem))

    @property
    def predicted_over_ideal(self) -> float:
        """Simulated time over the time of SMs that always compute (``dash.schedule``).

        For steps at the pace of an H200. Simulates each step: up to seconds for long problems.
        """
        ctas = self.grid, self.device.resident_ctas
        return _predict(self.strategy, self.group_split, _order_alone(self.problem), *ctas)

    def __str__(self) -> str:
        shapes = shapes_in_words(self.q_shape, self.kv_shape, self.problem.head_dim_v)
        lines = [
            ("problem", f"{shapes}, {dtype_name(self.dtype)}, {describe_mask(self.problem)}"),
            ("strategy", f"{self.strategy} ({self.why})"),
            ("groups", self._groups()),
            ("tiles", f"{self.tile_q} query rows x {self.tile_kv} key rows"),
            ("launch", self._launch()),
            ("workspace", f"{self.workspace_bytes:,} bytes"),
            ("fingerprint", self._fingerprint_or_why_not()),
        ]
        if self.forward is not None:
            lines.append(("forward", f"{self.forward}: {KNOWN[self.forward]}"))
        if self.alternatives:
            lines.append(("could run", ", ".join(self.alternatives)))
        lines += [(f"not {name}", reason) for name, reason in self.refusals]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)

    def _fingerprint_or_why_not(self) -> str:
        try:
            return self.fingerprint
        except UnsupportedError as error:
            return f"none: {'; '.join(error.reasons)}"

    def _groups(self) -> str:
        text = f"{self.q_shape[2] // self.kv_shape[2]} q heads to a KV head"
        if self.group_split > 1:
            text += f", in {self.group_split} parts with chains of their own"
        return text

    def _launch(self) -> str:
        return (
            f"{self.chains} chains in {self.tickets} tickets, persistent grid of {self.grid} CTAs "
            f"({self.device.name})"
        )


def describe_mask(problem: Problem) -> str:
    """The mask in words, windows as given."""
    left, right = problem.window_left, problem.window_right
    right = 0 if problem.causal else right
    if left is None and right is None:
        return "full"
    if left is None and right == 0:
        return "causal, bottom-right"
    before, after = ("all" if keys is None else f"{keys:,}" for keys in (left, right))
    return f"window of {before} keys before and {after} after, bottom-right"


def shapes_in_words(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], head_dim_v: int | None
) -> str:
    of_v = "" if head_dim_v is None else f", head_dim_v {head_dim_v}"
    return f"q {q_shape}, kv {kv_shape}{of_v}"


def plan(
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    causal: bool,
    strategy: str = "auto",
    group_split: int = 0,
    window_left: int | None = None,
    window_right: int | None = None,
    device: torch.device | str | int | None = None,
    forward: str = "auto",
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
    head_dim_v: int | None = None,
) -> Plan | VarlenPlan:
    """Says what the backward pass of a problem will do, without running anything.

    Args:
        q_shape: ``(batch, seqlen_q, heads, head_dim)``.
        kv_shape: ``(batch, seqlen_k, kv_heads, head_dim)``, of k.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        causal: bottom-right aligned causal mask.
        strategy: a strategy's name, or ``"auto"``.
        group_split: parts to cut the q heads of a KV head into, a divisor of heads / kv_heads. 0:
            what "auto" chooses (``csrc/schedule/auto.h``), and 1 with a named strategy.
        window_left, window_right: keys that a query sees before and after its own place; None: all.
        device: defaults to the current CUDA device where that is a Hopper GPU and this process has
            initialised CUDA, else to the model of an H200, which is also what the CPU
            implementation plans for. Without a device given nothing initialises CUDA.
        forward: the forward asked of ``dash.attention``; the plan names the one that will run on
            the device, if there is one.
        seqlens_q, seqlens_k: lengths of packed sequences. The shapes are then ``(total, heads,
            head_dim)``, and the plan is that of ``dash.plan_varlen``.
        head_dim_v: of v, out and dout; None: that of q and k.

    Raises:
        UnsupportedError: the problem or the strategy is not supported; says why.
    """
    if seqlens_q is not None:
        from dash.varlen.plan import plan_varlen  # which builds on this module

        return plan_varlen(
            q_shape,
            kv_shape,
            dtype,
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            strategy=strategy,
            group_split=group_split,
            forward=forward,
            device=device,
            head_dim_v=head_dim_v,
        )
    where = as_device(device)
    problem = Problem(
        tuple(q_shape),
        tuple(kv_shape),
        dtype,
        causal,
        strategy,
        group_split,
        window_left,
        window_right,
        where,
        None if head_dim_v in tuple(q_shape)[-1:] else head_dim_v,
    )
    p = checked_plan(problem)
    if device is None and where.type != "cuda":
        return p  # where attention will run, and so what its forward can be, is not known
    return replace(p, forward=planned_forward(problem, forward))


def checked_plan(problem: Problem) -> Plan:
    """``plan`` without a forward. Raises ``UnsupportedError``."""
    found = problem_reasons(problem)
    if found:
        raise UnsupportedError(found)
    return cached_plan(problem)


@functools.lru_cache(maxsize=1024)
def cached_plan(asked: Problem) -> Plan:
    """``plan`` for a checked problem."""
    model = device_model(asked.device, asked.dtype, *asked.head_dims)
    resident = model.resident_ctas
    if asked.strategy == "auto":
        name, split, why = choose(asked.in_tiles(1), resident, asked.group_split)
    else:
        split = asked.group_split or 1
        name, why = asked.strategy, "asked for"
    problem = asked.in_tiles(split)
    refusal = strategy_reason(name, problem, resident)
    if refusal is not None:
        raise UnsupportedError([refusal])
    against = {
        other: strategy_reason(other, problem, resident)
        for other in extension().strategies()
        if other != name
    }
    return Plan(
        strategy=name,
        why=why,
        refusals=tuple((other, text) for other, text in against.items() if text is not None),
        alternatives=tuple(other for other, text in against.items() if text is None),
        group_split=split,
        tile_q=problem.tile_q,
        tile_kv=problem.tile_kv,
        chains=problem.chains,
        tickets=extension().num_tickets(name, problem),
        grid=extension().num_ctas(name, problem, resident),
        cyclic=extension().is_cyclic(name),
        workspace_bytes=extension().workspace_bytes(problem, *asked.head_dims),
        problem=asked,
        device=model,
    )


@functools.lru_cache(maxsize=256)
def _predict(
    strategy: str, group_split: int, problem: Problem, grid: int, resident_ctas: int
) -> float:
    from dash.schedule import H200_KERNEL, H200_MEMORY, Play, simulate  # not for the operator

    play = Play.of(strategy, problem.in_tiles(group_split))
    # K, V, dK and dV of a KV tile, in 16 bit; a q tile's bytes are taken as of 64 and 128.
    chain = 2 * play.problem.tile_kv * sum(extension().head_dim_bucket(*problem.head_dims)) * 2
    machine = H200_KERNEL.with_(sms=grid, memory=replace(H200_MEMORY, chain=chain))
    # The ideal is that of the whole chip: SMs that the grid leaves idle count.
    return simulate(play, machine).over_ideal * resident_ctas / grid


def _order_alone(problem: Problem) -> Problem:
    """The problem without what was asked for and where, as a key of what follows from the rest."""
    return problem._replace(strategy="auto", group_split=0, device=torch.device("cpu"))


def _order_of_one(problem: Problem) -> Problem:
    return _order_alone(problem.one_sequence)


def as_device(device: torch.device | str | int | None) -> torch.device:
    """The device of a plan, as ``plan`` takes it."""
    if device is None:
        return planned_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
