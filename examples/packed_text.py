"""Packed sequences of bytes from text that the repository ships: its documents and its code.

A step's documents follow from (seed, step, rank) alone, so a resumed run needs no reader's state:
it asks for the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 256  # bytes
ORDERS = ("drawn", "reversed", "longest-first")


@dataclass(frozen=True)
class Pack:
    """Documents one after another, and what attention and the loss need to keep them apart.

    Attributes:
        tokens, targets: ``(total,)`` int64; a target is the byte that follows its token.
        positions: ``(total,)`` int64, from 0 in each document.
        cu_seqlens: ``(documents + 1,)`` int32 bounds.
        lengths: of the documents, on the host.
        order: ``drawn_index`` of each document: where it comes in the order drawn.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]
    order: tuple[int, ...]


class PackedText:
    """Packs of ``total`` bytes, of documents with lengths from ``shortest`` to ``longest``."""

    def __init__(self, total: int, shortest: int, longest: int, seed: int) -> None:
        self.total, self.shortest, self.longest, self.seed = total, shortest, longest, seed
        files = [path for folder in ("docs", "csrc", "dash") for path in (ROOT / folder).rglob("*")]
        text = [path for path in sorted(files) if path.suffix in (".md", ".py", ".h", ".cuh")]
        self.text = torch.frombuffer(
            bytearray(b"\n".join(path.read_bytes() for path in text)), dtype=torch.uint8
        )

    def pack(self, step: int, rank: int, order: str, device: torch.device) -> Pack:
        """The documents of a step and rank, in one of ``ORDERS``."""
        starts, lengths = self._draw(step, rank)
        places = list(range(len(lengths)))
        if order == "reversed":
            places.reverse()
        elif order == "longest-first":
            places.sort(key=lambda place: -lengths[place])
        spans = [(starts[place], lengths[place]) for place in places]
        cut = [self.text[start : start + length + 1].long() for start, length in spans]
        lengths = tuple(length for _, length in spans)
        bounds = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
        return Pack(
            tokens=torch.cat([document[:-1] for document in cut]).to(device),
            targets=torch.cat([document[1:] for document in cut]).to(device),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            cu_seqlens=bounds.to(device),
            lengths=lengths,
            order=tuple(places),
        )

    def _draw(self, step: int, rank: int) -> tuple[list[int], list[int]]:
        """Starts in the text and lengths; many short documents, few long ones; the last is cut."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 4_099 + rank)
        starts, lengths, left = [], [], self.total
        ratio = self.longest / self.shortest
        while left > 0:
            where, how_long = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
            length = min(left, int(self.shortest * ratio**how_long))
            starts.append(int(where * (len(self.text) - length - 1)))
            lengths.append(length)
            left -= length
        return starts, lengths
