"""Which keys a query sees: causal masks and windows as one band, bottom-right aligned."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mask(NamedTuple):
    """A query at ``row`` sees columns ``row + offset - left`` to ``row + offset + right``.

    Attributes:
        seqlen_q, seqlen_k: rows and columns that exist.
        left, right: keys to either side; None: all of them.
    """

    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None

    @classmethod
    def of(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        causal: bool,
        window_left: int | None = None,
        window_right: int | None = None,
    ) -> Mask:
        """A causal mask is a window without keys to the right; both together are what both show."""
        right = 0 if causal else window_right
        return cls(seqlen_q, seqlen_k, window_left, right)

    @property
    def offset(self) -> int:
        """What puts the last query at the last key."""
        return self.seqlen_k - self.seqlen_q

    @property
    def full(self) -> bool:
        return self.left is None and self.right is None

    def sees(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """``(rows, columns)`` bool, for indices of shape ``(rows,)`` and ``(columns,)``."""
        place = rows[:, None] + self.offset
        visible = (rows < self.seqlen_q)[:, None] & (columns < self.seqlen_k)
        if self.left is not None:
            visible = visible & (columns >= place - self.left)
        if self.right is not None:
            visible = visible & (columns <= place + self.right)
        return visible

    @property
    def keyless_rows(self) -> int:
        """Rows 0 … keyless_rows - 1 see no key; every later one sees its own place's or one beside.

        The mask decides this, and no lse.
        """
        if self.seqlen_k == 0:
            return self.seqlen_q
        return 0 if self.right is None else max(0, -self.offset - self.right)
