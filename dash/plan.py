"""Plans: what a backward pass will do, known before anything runs.

A plan is a pure function of the problem and the device model. Its fingerprint names the order of
every floating-point addition that the schedule decides, and belongs in a training log next to the
seed: equal fingerprints and equal inputs give equal bits, on every GPU that dash runs on.
"""

from __future__ import annotations

import array
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from dash.auto import choose
from dash.device import DeviceModel, default_device, device_model, dtype_name
from dash.extension import extension
from dash.support import (
    UnsupportedError,
    make_problem,
    shape_reasons,
    split_reasons,
    strategy_reason,
)

# Part of every fingerprint. Raise it when a kernel change alters bits under an unchanged schedule:
# another order of products inside a step, another rounding, another exp.
ORDER_VERSION = 2

_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class Plan:
    """What ``torch.ops.dash.attention_bwd`` will do for one problem on one device.

    Attributes:
        strategy: the schedule that will run.
        why: one sentence: asked for, or which rule of ``auto`` chose it.
        reasons: for each strategy not taken, a sentence that says why not.
        alternatives: those of them that could run.
        group_split: parts into which the q heads of a KV head are cut; each has chains of its own,
            whose dK and dV are added in the order of the parts. 1: whole groups.
        tile_q, tile_kv: query rows a step and key rows a chain.
        chains: KV tiles over all batches, kv heads and parts; each has dK and dV in registers.
        tickets: units of launch, taken in order from a counter.
        grid: CTAs launched. It changes the time, never the bits.
        cyclic: chains wait for each other in both directions.
        workspace_bytes: device memory beyond the outputs.
        q_shape, kv_shape: ``(batch, seqlen, heads, head_dim)``.
        dtype, causal: the rest of the problem.
        device: the device model that the plan was made for.
    """

    strategy: str
    why: str
    reasons: Mapping[str, str]
    alternatives: tuple[str, ...]
    group_split: int
    tile_q: int
    tile_kv: int
    chains: int
    tickets: int
    grid: int
    cyclic: bool
    workspace_bytes: int
    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    dtype: torch.dtype
    causal: bool
    device: DeviceModel

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
        one = (1, *self.q_shape[1:]), (1, *self.kv_shape[1:])
        return _fingerprint(self.strategy, self.group_split, *one, self.dtype, self.causal)

    @property
    def predicted_over_ideal(self) -> float:
        """Simulated time over the time of SMs that always compute (``dash.schedule``).

        For steps at the pace of an H200. Simulates each step: up to seconds for long problems.
        """
        shapes = self.q_shape, self.kv_shape
        ctas = self.grid, self.device.resident_ctas
        return _predict(self.strategy, self.group_split, *shapes, self.causal, *ctas)

    def __str__(self) -> str:
        mask = "causal, bottom-right" if self.causal else "full"
        lines = [
            ("problem", f"q {self.q_shape}, kv {self.kv_shape}, {dtype_name(self.dtype)}, {mask}"),
            ("strategy", f"{self.strategy} ({self.why})"),
            ("groups", self._groups()),
            ("tiles", f"{self.tile_q} query rows x {self.tile_kv} key rows"),
            ("launch", self._launch()),
            ("workspace", f"{self.workspace_bytes:,} bytes"),
            ("fingerprint", self.fingerprint),
        ]
        lines += [(f"not {name}", reason) for name, reason in self.reasons.items()]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)

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


def plan(
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    causal: bool,
    strategy: str = "auto",
    group_split: int = 0,
    device: torch.device | str | int | None = None,
) -> Plan:
    """Says what the backward pass of a problem will do, without running anything.

    Args:
        q_shape: ``(batch, seqlen_q, heads, head_dim)``.
        kv_shape: ``(batch, seqlen_k, kv_heads, head_dim)``.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        causal: bottom-right aligned causal mask.
        strategy: a strategy's name, or ``"auto"``.
        group_split: parts to cut the q heads of a KV head into, a divisor of heads / kv_heads. 0:
            what "auto" chooses (``csrc/schedule/auto.h``), and 1 with a named strategy.
        device: defaults to the current CUDA device where that is a Hopper GPU, else to the model
            of an H200, which is also what the CPU implementation plans for.

    Raises:
        UnsupportedError: the problem or the strategy is not supported; says why.
    """
    shapes = tuple(q_shape), tuple(kv_shape)
    found = shape_reasons(*shapes, dtype) or split_reasons(*shapes, group_split)
    if found:
        raise UnsupportedError(found)
    where = default_device() if device is None else _as_device(device)
    return cached_plan(*shapes, dtype, causal, strategy, group_split, where)


@functools.lru_cache(maxsize=1024)
def cached_plan(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
    causal: bool,
    strategy: str,
    group_split: int,
    device: torch.device,
) -> Plan:
    """``plan`` for checked arguments."""
    model = device_model(device, dtype, q_shape[3])
    resident = model.resident_ctas
    if strategy == "auto":
        name, split, why = choose(make_problem(q_shape, kv_shape, causal), resident, group_split)
    else:
        split = group_split or 1
        name, why = strategy, "asked for"
    problem = make_problem(q_shape, kv_shape, causal, split)
    refusal = strategy_reason(name, problem, resident)
    if refusal is not None:
        raise UnsupportedError([refusal])
    against = {
        other: strategy_reason(other, problem, resident)
        for other in extension().strategies()
        if other != name
    }
    tickets = extension().num_tickets(name, problem)
    return Plan(
        strategy=name,
        why=why,
        reasons=MappingProxyType(
            {
                other: text or f"could run; {name} was taken ({why})"
                for other, text in against.items()
            }
        ),
        alternatives=tuple(other for other, text in against.items() if text is None),
        group_split=split,
        tile_q=problem.tile_q,
        tile_kv=problem.tile_kv,
        chains=problem.chains,
        tickets=tickets,
        grid=extension().num_ctas(name, problem, resident),
        cyclic=extension().is_cyclic(name),
        workspace_bytes=extension().workspace_bytes(problem, q_shape[3]),
        q_shape=q_shape,
        kv_shape=kv_shape,
        dtype=dtype,
        causal=causal,
        device=model,
    )


@functools.lru_cache(maxsize=256)
def _fingerprint(
    strategy: str,
    group_split: int,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
    causal: bool,
) -> str:
    """Hashes the problem of one sequence, then each chain's visits and turns by (head, KV tile)."""
    problem = make_problem(q_shape, kv_shape, causal, group_split)
    bucket = extension().head_dim_bucket(q_shape[3])
    header = (
        f"dash order {ORDER_VERSION} {strategy} {dtype_name(dtype)} causal={causal} q={q_shape} "
        f"kv={kv_shape} bucket={bucket} tiles={problem.tile_q}x{problem.tile_kv}"
    )
    if group_split > 1:
        header += f" group split in {group_split}"
    digest = hashlib.sha256(header.encode())
    for (kv_head, kv_tile), rows in sorted(_chains(strategy, problem)):
        visits = array.array("q", itertools.chain((kv_head, kv_tile, len(rows)), *rows))
        digest.update(visits.tobytes())
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def _chains(strategy: str, problem: object) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """((kv_head, kv_tile), [(q_tile, turn), …]) of every chain, in launch order."""
    tickets = range(extension().num_tickets(strategy, problem))
    played = (extension().ticket(strategy, problem, ticket) for ticket in tickets)
    return [((kv_head, kv_tile), rows) for chains in played for _, kv_head, kv_tile, rows in chains]


@functools.lru_cache(maxsize=256)
def _predict(
    strategy: str,
    group_split: int,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    causal: bool,
    grid: int,
    resident_ctas: int,
) -> float:
    from dash.schedule import H200_KERNEL, H200_MEMORY, Play, simulate  # not for the operator

    play = Play.of(strategy, make_problem(q_shape, kv_shape, causal, group_split))
    # K, V, dK and dV of a KV tile; a q tile's bytes are the same for both buckets.
    chain = 4 * play.problem.tile_kv * extension().head_dim_bucket(q_shape[3]) * 2
    machine = H200_KERNEL.with_(sms=grid, memory=replace(H200_MEMORY, chain=chain))
    # The ideal is that of the whole chip: SMs that the grid leaves idle count.
    return simulate(play, machine).over_ideal * resident_ctas / grid


def _as_device(device: torch.device | str | int) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
