"""To which sequence each row of a pack belongs, found on the device without waiting for it.

Every index is clamped into the tensors, so that ``cu_seqlens`` that describe no pack give wrong
rows and no access outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Owners(NamedTuple):
    """For each row of a pack, int64 or bool ``(total,)``.

    Attributes:
        sequence: the sequence in whose space it lies; any where ``inside`` is false.
        position: its place there.
        inside: whether it belongs to a sequence.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    inside: torch.Tensor


def owners(cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> Owners:
    """The owners of ``total`` rows."""
    if cu_seqlens.shape[0] == 1:  # no sequence: one that is empty stands for it
        cu_seqlens, seqused = cu_seqlens.new_zeros(2), None
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    rows = torch.arange(total, device=cu_seqlens.device)
    # The first sequence that ends behind the row: empty ones before it do not.
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=starts.shape[0] - 1)
    position = rows - starts[sequence]
    lengths = ends - starts if seqused is None else seqused
    inside = (position >= 0) & (position < lengths[sequence])
    return Owners(sequence, position.clamp(min=0), inside)


def rows_of_none(
    cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int
) -> torch.Tensor:
    """bool ``(total,)``: rows that belong to no sequence. Two kernels where there are no gaps."""
    if seqused is not None:
        return ~owners(cu_seqlens, seqused, total).inside
    return torch.arange(total, device=cu_seqlens.device) >= cu_seqlens[-1]


def keyless_rows(
    of_q: Owners,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    right: int | None,
) -> torch.Tensor:
    """bool ``(total_q,)``: rows that see no key, and rows of no sequence.

    Args:
        of_q: the owners of q's rows.
        right: keys that a row sees behind its own place; None: all; causal: 0.
    """
    if cu_seqlens_q.shape[0] == 1:
        return ~of_q.inside
    seqlens_q, seqlens_k = (
        (cu[1:] - cu[:-1] if used is None else used).long()[of_q.sequence]
        for cu, used in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k))
    )
    keyless = ~of_q.inside | (seqlens_k <= 0)
    if right is not None:
        keyless |= of_q.position + seqlens_k - seqlens_q + right < 0
    return keyless


def close_gaps(
    cu_seqlens: torch.Tensor, seqused: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Copies without the rows that ``seqused`` leaves between sequences.

    Returns:
        ``cu_seqlens`` of the copies; the copies, as long as the tensors (what is behind their last
        sequence may hold anything); and for each row of the tensors its place in the copies, 0
        where it has none.
    """
    total = tensors[0].shape[0]
    dense = torch.nn.functional.pad(seqused.cumsum(0, dtype=torch.int32), (1, 0))
    to = owners(dense, None, total)
    source = (cu_seqlens.long()[to.sequence] + to.position).clamp(0, total - 1)
    there = owners(cu_seqlens, seqused, total)
    back = (dense.long()[there.sequence] + there.position).clamp(0, total - 1)
    return dense, tuple(t[source] for t in tensors), torch.where(there.inside, back, 0)
