"""Where the sequences of a pack lie, read on the host: for the CPU, where reading costs nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dash.support import UnsupportedError


@dataclass(frozen=True)
class EqualSequences:
    """The sequences of a pack with the same two lengths.

    Attributes:
        rows_q: ``(n, seqlen_q)`` int64, the rows of q of each of them.
        rows_k: ``(n, seqlen_k)`` int64, the rows of k.
    """

    rows_q: torch.Tensor
    rows_k: torch.Tensor

    @property
    def empty(self) -> bool:
        """Whether there is no query or no key, so nothing to compute."""
        return self.rows_q.shape[1] == 0 or self.rows_k.shape[1] == 0


def sequences_by_length(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    total_q: int,
    total_k: int,
) -> Iterator[EqualSequences]:
    """The pack's sequences, those of equal lengths together. On a GPU it waits for the device.

    Raises:
        UnsupportedError: the first entry is not 0, an entry is smaller than the one before or
            beyond the tensors, or a sequence is said to use more rows than it has.
    """
    found: list[str] = []
    starts_q, lengths_q = _spaces("q", cu_seqlens_q, seqused_q, total_q, found)
    starts_k, lengths_k = _spaces("k", cu_seqlens_k, seqused_k, total_k, found)
    if found:
        raise UnsupportedError(found)
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    sequences = zip(starts_q, lengths_q, starts_k, lengths_k, strict=True)
    for start_q, length_q, start_k, length_k in sequences:
        starts[length_q, length_k].append((start_q, start_k))
    for (length_q, length_k), pairs in starts.items():
        first = torch.tensor(pairs, device=cu_seqlens_q.device)
        yield EqualSequences(
            rows_q=first[:, :1] + torch.arange(length_q, device=first.device),
            rows_k=first[:, 1:] + torch.arange(length_k, device=first.device),
        )


def _spaces(
    side: str, cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int, found: list[str]
) -> tuple[list[int], list[int]]:
    """The first row and the length of each sequence; what is wrong goes to ``found``."""
    ends = cu_seqlens.tolist()
    starts, spaces = ends[:-1], [end - start for start, end in itertools.pairwise(ends)]
    name = f"cu_seqlens_{side}"
    if ends[0] != 0:
        found.append(f"{name} starts with {ends[0]}; required: 0")
    if spaces and min(spaces) < 0:
        at = next(i for i, space in enumerate(spaces) if space < 0)
        found.append(
            f"{name} has {ends[at + 1]} after {ends[at]} at entry {at + 1}; required: entries that "
            "do not decrease"
        )
    if ends[-1] > total:
        found.append(f"{name} ends with {ends[-1]}; required: at most {total}, the rows of {side}")
    if seqused is None:
        return starts, spaces
    lengths = seqused.tolist()
    for at, (length, space) in enumerate(zip(lengths, spaces, strict=True)):
        if not 0 <= length <= space:
            found.append(
                f"seqused_{side} is {length} at entry {at}; required: from 0 to {space}, the rows "
                f"that {name} gives this sequence"
            )
            break
    return starts, lengths
