"""The backward pass on the CPU: the same plan, walked tile by tile in plain PyTorch.

It reads the schedule that the kernel compiles, one ticket after another, and makes every addition
that the schedule orders in fp32 and in that order:

- dK and dV of a KV tile grow in the chain's visit order, the q heads of the group innermost; the
  parts of a split group, which have chains of their own, are added in ascending order;
- dQ of a q tile grows in turn order: turn 0 stores, the others add, then it is scaled and rounded;
- P is rounded to the inputs' dtype for dV, dS (not yet scaled) for dK and dQ, as the kernel does;
  the kernel for a head_dim of q and k beyond 128 makes dS from the rounded P, and so does this.

The sums inside one tile's product have no planned order. They are taken in fp64 and rounded to fp32
once, so that no blocking of a BLAS library shows in the result. Bits equal the GPU's only where
each of these sums is exact. Sequences and heads with one order are computed together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from dash.extension import extension
from dash.mask import Mask
from dash.plan import Plan

LOG2_E = math.log2(math.e)

# Beyond, registers hold P in 16 bit alone (csrc/bwd/mma_wide.cuh).
_MOST_WITH_P_IN_FP32 = 128  # head_dim of q and k

Rows = tuple[tuple[int, int], ...]  # (q_tile, turn) in the order visited
Chains = tuple[tuple[int, Rows], ...]  # (kv_tile, rows) of one (batch, kv head) in launch order


class TurnOrderError(RuntimeError):
    """A schedule left a q tile's sum incomplete, or named one of its turns twice."""


class TurnOrderedSum:
    """fp32 sums of q tiles whose terms are added in turn order, in whatever order they arrive.

    A term that comes before its turn waits, as a dQ writer of the kernel waits for its turn.
    """

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._turns: dict[int, int] = defaultdict(int)
        self._early: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, q_tile: int, turn: int, term: torch.Tensor) -> None:
        """Adds ``term`` (fp32) to the sum of ``q_tile`` once all earlier turns are in it."""
        if turn < self._turns[q_tile] or (q_tile, turn) in self._early:
            raise TurnOrderError(f"q tile {q_tile} was given turn {turn} twice")
        self._early[q_tile, turn] = term
        while (q_tile, self._turns[q_tile]) in self._early:
            due = self._early.pop((q_tile, self._turns[q_tile]))
            self._sums[q_tile] = self._sums[q_tile] + due if q_tile in self._sums else due
            self._turns[q_tile] += 1

    def finish(self) -> dict[int, torch.Tensor]:
        """The sums by q tile. Raises ``TurnOrderError`` if a term still waits for its turn."""
        if self._early:
            raise TurnOrderError(f"no earlier turn came for (q tile, turn) {sorted(self._early)}")
        return self._sums


@dataclass
class _Heads:
    """The tensors of ``n`` (batch, kv head) pairs with one order, padded to whole tiles.

    Attributes:
        q, dout: ``(n, group, q_tiles · tile_q, head_dim)``, dout with head_dim_v; zero in rows that
            the mask leaves no key, whatever the inputs hold there.
        k, v: ``(n, kv_tiles · tile_kv, head_dim)``, v with head_dim_v.
        lse_log2: ``(n, group, q_tiles · tile_q)`` fp32, lse · log2 e; +inf in rows without keys.
        delta: like lse_log2: rowsum of dO ∘ O less dlse, 0 in rows without keys.
    """

    q: torch.Tensor
    dout: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse_log2: torch.Tensor
    delta: torch.Tensor


@torch.autocast("cpu", enabled=False)  # products are taken in the precision written here
def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float,
    plan: Plan,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of attention, in the plan's order.

    Args:
        dout, q, out: ``(batch, seqlen_q, heads, head_dim)``.
            dout and out may have another last size, head_dim_v.
        k, v: ``(batch, seqlen_k, kv_heads, head_dim)``, v with head_dim_v.
        softmax_lse: ``(batch, heads, seqlen_q)`` fp32.
        softmax_scale: factor on the scores.
        plan: what ``dash.plan`` says about these shapes.
        dlse: like softmax_lse, a gradient of it; None: there is none.
    """
    problem = plan.problem.in_tiles(plan.group_split)
    mask = plan.problem.mask
    dq = q.new_zeros(q.shape)
    dk_parts, dv_parts = (
        t.new_zeros((*t.shape[:2], problem.kv_slices, t.shape[3]), dtype=torch.float32)
        for t in (k, v)
    )
    grouped_dq = dq.unflatten(2, (problem.kv_slices, problem.heads_of_chain))
    for chains, pairs in _pairs_by_order(plan.strategy, problem).items():
        batches, kv_heads = (torch.tensor(i, device="cpu") for i in zip(*pairs, strict=True))
        heads = _gather(dout, q, k, v, out, softmax_lse, dlse, problem, mask, batches, kv_heads)
        head_dq, head_dk, head_dv = _play(chains, heads, problem, mask, softmax_scale)
        # (n, group, seqlen, head_dim) → (n, seqlen, group, head_dim)
        grouped_dq[batches, :, kv_heads] = head_dq.transpose(1, 2)[:, : problem.seqlen_q]
        dk_parts[batches, :, kv_heads] = head_dk[:, : problem.seqlen_k]
        dv_parts[batches, :, kv_heads] = head_dv[:, : problem.seqlen_k]
    dk = (_sum_parts(dk_parts, problem) * softmax_scale).to(k.dtype)
    return dq, dk, _sum_parts(dv_parts, problem).to(v.dtype)


def _sum_parts(parts: torch.Tensor, problem: object) -> torch.Tensor:
    """``(batch, seqlen_k, parts of all groups, head_dim)`` → the sums of each group's, in order."""
    first, *others = parts.unflatten(2, (-1, problem.group_split)).unbind(3)
    for part in others:
        first = first + part
    return first


def _pairs_by_order(strategy: str, problem: object) -> dict[Chains, list[tuple[int, int]]]:
    """(batch, kv head) pairs, grouped by the order that the schedule gives them."""
    chains_of: dict[tuple[int, int], list[tuple[int, Rows]]] = defaultdict(list)
    for ticket in range(extension().num_tickets(strategy, problem)):
        for batch, kv_head, kv_tile, rows in extension().ticket(strategy, problem, ticket):
            chains_of[batch, kv_head].append((kv_tile, tuple(rows)))
    pairs: dict[Chains, list[tuple[int, int]]] = defaultdict(list)
    for pair, chains in chains_of.items():
        pairs[tuple(chains)].append(pair)
    return pairs


def _gather(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dlse: torch.Tensor | None,
    problem: object,
    mask: Mask,
    batches: torch.Tensor,
    kv_heads: torch.Tensor,
) -> _Heads:
    """The pairs' tensors, padded; what rows without keys hold is dropped here, NaN included."""
    more_q = problem.q_tiles * problem.tile_q - problem.seqlen_q
    more_kv = problem.kv_tiles * problem.tile_kv - problem.seqlen_k

    def q_side(t: torch.Tensor) -> torch.Tensor:
        grouped = t.unflatten(2, (problem.kv_slices, problem.heads_of_chain))
        return grouped[batches, :, kv_heads].transpose(1, 2)

    def kv_side(t: torch.Tensor) -> torch.Tensor:
        head = t[batches, :, kv_heads // problem.group_split]
        return torch.nn.functional.pad(head, (0, 0, 0, more_kv))

    def by_head(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (problem.kv_slices, problem.heads_of_chain))[batches, kv_heads]

    lse = by_head(softmax_lse)
    keyless = torch.arange(problem.seqlen_q, device="cpu") < mask.keyless_rows
    head_q, head_dout, head_out = (
        q_side(t).masked_fill(keyless[:, None], 0.0) for t in (q, dout, out)
    )
    delta = (head_dout.double() * head_out.double()).sum(-1).float()
    if dlse is not None:
        delta = delta - by_head(dlse).masked_fill(keyless, 0.0)
    lse_log2 = lse.masked_fill(keyless, torch.inf) * LOG2_E
    pad_rows = (0, 0, 0, more_q)
    return _Heads(
        q=torch.nn.functional.pad(head_q, pad_rows),
        dout=torch.nn.functional.pad(head_dout, pad_rows),
        k=kv_side(k),
        v=kv_side(v),
        lse_log2=torch.nn.functional.pad(lse_log2, (0, more_q), value=torch.inf),
        delta=torch.nn.functional.pad(delta, (0, more_q)),
    )


def _play(
    chains: Chains, heads: _Heads, problem: object, mask: Mask, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plays the chains one after another.

    Returns:
        dq ``(n, group, q_tiles · tile_q, head_dim)``, scaled and rounded to the inputs' dtype, and
        dk, dv ``(n, kv_tiles · tile_kv, head_dim)`` fp32, not scaled.
    """
    dtype = heads.q.dtype
    rounds_p_first = heads.q.shape[-1] > _MOST_WITH_P_IN_FP32
    dq_sum = TurnOrderedSum()
    dq = torch.zeros_like(heads.q)
    dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (heads.k, heads.v))
    for kv_tile, rows in chains:
        columns = _tile(kv_tile, problem.tile_kv)
        k, v = heads.k[:, None, columns].double(), heads.v[:, None, columns].double()
        dk_acc, dv_acc = dk[:, columns], dv[:, columns]
        for q_tile, turn in rows:
            r = _tile(q_tile, problem.tile_q)
            q, dout = heads.q[:, :, r].double(), heads.dout[:, :, r].double()
            lse_log2 = heads.lse_log2[:, :, r, None]
            visible = mask.sees(_indices(r), _indices(columns))
            # P and dS are (n, group, tile_q, tile_kv); as operands they are rounded to the dtype.
            s = _product(q, k.mT)
            p = torch.exp2(s * (softmax_scale * LOG2_E) - lse_log2)
            p = torch.where(visible, p, 0.0)
            if rounds_p_first:
                p = p.to(dtype).float()
            ds = p * (_product(dout, v.mT) - heads.delta[:, :, r, None])
            ds = torch.where(visible, ds, 0.0).to(dtype).double()
            _add_heads(dv_acc, _product(p.to(dtype).double().mT, dout))
            _add_heads(dk_acc, _product(ds.mT, q))
            dq_sum.add(q_tile, turn, _product(ds, k))
    for q_tile, total in dq_sum.finish().items():
        dq[:, :, _tile(q_tile, problem.tile_q)] = (total * softmax_scale).to(dtype)
    return dq, dk, dv


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product of fp64 operands that hold 16-bit values, rounded to fp32 once."""
    return (a @ b).float()


def _add_heads(accumulator: torch.Tensor, terms: torch.Tensor) -> None:
    """Adds ``(n, group, …)`` terms to an ``(n, …)`` accumulator, one q head after another."""
    for term in terms.unbind(1):
        accumulator += term


def _indices(tile: slice) -> torch.Tensor:
    return torch.arange(tile.start, tile.stop, device="cpu")


def _tile(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)
