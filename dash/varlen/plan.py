"""Plans of packed calls: what the backward will do with each length, known before anything runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dash.device import dtype_name
from dash.extension import extension
from dash.plan import Plan, as_device, checked_plan, shapes_in_words
from dash.problem import Problem
from dash.support import UnsupportedError
from dash.varlen import checks
from dash.varlen.forward import KNOWN, planned_forward
from dash.varlen.launch import pack_arguments

_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class SequencePlan:
    """What happens to the sequences of one length in a pack.

    Attributes:
        seqlen_q, seqlen_k: rows of a sequence.
        count: how many sequences of the pack are like this.
        plan: the plan of the dense call on one of them, whose order and bits they have; None where
            there is nothing to compute (no query or no key).
    """

    seqlen_q: int
    seqlen_k: int
    count: int
    plan: Plan | None


@dataclass(frozen=True)
class VarlenPlan:
    """What ``torch.ops.dash.attention_varlen_bwd`` will do for a list of lengths.

    Attributes:
        sequences: one entry for each distinct pair of lengths, in the order of the pack.
        workspace_bytes: device memory beyond the outputs, the same for all lengths.
        q_shape: ``(total_q, heads, head_dim)``.
        kv_shape: ``(total_k, kv_heads, head_dim)``.
        dtype, causal, window_left, window_right: the rest of the problem.
        forward: what ``dash.attention_varlen`` would take for out and lse; None where the plan is
            for no device in particular.
        head_dim_v: of v; None where it is that of q and k.
    """

    sequences: tuple[SequencePlan, ...]
    workspace_bytes: int
    q_shape: tuple[int, int, int]
    kv_shape: tuple[int, int, int]
    dtype: torch.dtype
    causal: bool
    window_left: int | None = None
    window_right: int | None = None
    forward: str | None = None
    head_dim_v: int | None = None

    @property
    def batch(self) -> int:
        return sum(one.count for one in self.sequences)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the fingerprints of the distinct lengths.

        The same for every order and number of these lengths: the order of the sums of a gradient
        does not depend on them.
        """
        found = sorted({one.plan.fingerprint for one in self.sequences if one.plan is not None})
        return hashlib.sha256(" ".join(found).encode()).hexdigest()[:_FINGERPRINT_DIGITS]

    def __str__(self) -> str:
        mask = "causal, bottom-right in each sequence" if self.causal else "full"
        if self.window_left is not None or self.window_right is not None:
            mask += f", window {self.window_left} to the left, {self.window_right} to the right"
        shapes = shapes_in_words(self.q_shape, self.kv_shape, self.head_dim_v)
        head = [
            ("problem", f"{shapes}, {dtype_name(self.dtype)}, {mask}"),
            ("sequences", f"{self.batch} of {len(self.sequences)} distinct lengths"),
            ("workspace", f"{self.workspace_bytes:,} bytes, whatever the lengths"),
            ("fingerprint", f"{self.fingerprint}, of all lengths"),
        ]
        if self.forward is not None:
            head.append(("forward", f"{self.forward}: {KNOWN[self.forward]}"))
        width = max(len(label) for label, _ in head)
        lines = [f"{label:<{width}}  {text}" for label, text in head]
        table = [("count", "seqlen_q", "seqlen_k", "strategy", "groups", "fingerprint")]
        table += [_row(one) for one in self.sequences]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines += [
            "  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(lines)


def _row(one: SequencePlan) -> tuple[str, ...]:
    lengths = f"{one.count:,}", f"{one.seqlen_q:,}", f"{one.seqlen_k:,}"
    if one.plan is None:
        return *lengths, "nothing to do", "", ""
    groups = "whole" if one.plan.group_split == 1 else f"in {one.plan.group_split} parts"
    return *lengths, one.plan.strategy, groups, one.plan.fingerprint


def plan_varlen(
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int] | None = None,
    causal: bool,
    window_left: int | None = None,
    window_right: int | None = None,
    strategy: str = "auto",
    group_split: int = 0,
    forward: str = "auto",
    device: torch.device | str | int | None = None,
    head_dim_v: int | None = None,
) -> VarlenPlan:
    """Says what the packed backward will do with sequences of these lengths.

    Nothing runs and no device is asked for contents. The lengths decide no bit of each other and
    no launch: grid and workspace follow from the shapes and from how many lengths there are.

    Args:
        q_shape: ``(total_q, heads, head_dim)``.
        kv_shape: ``(total_k, kv_heads, head_dim)``.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        seqlens_q: rows of q of each sequence: ``cu_seqlens_q.diff().tolist()``.
        seqlens_k: rows of k; None: those of q.
        causal, window_left, window_right, strategy, group_split, forward, device, head_dim_v: as
            for ``dash.plan``.

    Raises:
        UnsupportedError: the problem or the strategy is not supported; says why.
    """
    seqlens_q = list(seqlens_q)
    seqlens_k = seqlens_q if seqlens_k is None else list(seqlens_k)
    shapes = tuple(q_shape), tuple(kv_shape)
    where = as_device(device)
    of_v = None if head_dim_v == shapes[0][-1] else head_dim_v
    _check_lengths(*shapes, seqlens_q, seqlens_k)
    windows = {"window_left": window_left, "window_right": window_right}
    rest = {"causal": causal, "strategy": strategy, "group_split": group_split}
    order = rest | {name: size for name, size in windows.items() if size is not None}

    def plan_of(seqlen_q: int, seqlen_k: int, **order: object) -> Plan | None:
        if seqlen_q == 0 or seqlen_k == 0:
            return None
        one = (1, seqlen_q, *shapes[0][1:]), (1, seqlen_k, *shapes[1][1:])
        return checked_plan(Problem(*one, dtype, **order, device=where, head_dim_v=of_v))

    totals = shapes[0][0], shapes[1][0]
    # What the operator checks: it knows the totals alone.
    if (reason := checks.why_not_by_name(strategy)) is not None:
        raise UnsupportedError([reason])
    for asked in (order, rest):
        plan_of(*totals, **asked)
    counts = Counter(zip(seqlens_q, seqlens_k, strict=True))
    return VarlenPlan(
        sequences=tuple(
            SequencePlan(*lengths, count, plan_of(*lengths, **order))
            for lengths, count in counts.items()
        ),
        workspace_bytes=extension().varlen_workspace_bytes(
            batch=max(1, len(seqlens_q)),
            **pack_arguments(*shapes, **order, head_dim_v=of_v),
        ),
        q_shape=shapes[0],
        kv_shape=shapes[1],
        dtype=dtype,
        causal=causal,
        **windows,
        # Where attention will run, and so what its forward can be, is not always known.
        forward=None
        if device is None and where.type != "cuda"
        else planned_forward(
            *shapes, dtype, len(seqlens_q), causal, *windows.values(), where, forward, of_v
        ),
        head_dim_v=of_v,
    )


def _check_lengths(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    seqlens_q: list[int],
    seqlens_k: list[int],
) -> None:
    found = []
    for name, shape in (("q_shape", q_shape), ("kv_shape", kv_shape)):
        if len(shape) != 3 or min(shape) <= 0:
            found.append(f"{name} is {shape}; required: 3 positive sizes (total, heads, head_dim)")
    if len(seqlens_k) != len(seqlens_q):
        found.append(
            f"seqlens_k has {len(seqlens_k)} lengths; required: {len(seqlens_q)}, as seqlens_q has"
        )
    sides = (("q", q_shape, seqlens_q), ("k", kv_shape, seqlens_k))
    for side, shape, seqlens in sides if not found else ():
        if min(seqlens, default=0) < 0:
            found.append(f"seqlens_{side} has {min(seqlens)}; required: no negative length")
        if sum(seqlens) > shape[0]:
            found.append(
                f"seqlens_{side} sums to {sum(seqlens)}; required: at most {shape[0]}, the rows "
                f"of {side}"
            )
    if found:
        raise UnsupportedError(found)
