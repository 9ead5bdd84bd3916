"""One attention backward as a value: what checks, plan, reference and launch are all told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dash.extension import extension
from dash.mask import Mask


class Problem(NamedTuple):
    """All that decides the order of a backward's sums. Hashable: plans are remembered by it.

    Attributes:
        q_shape, kv_shape: ``(batch, seqlen, heads, head_dim)``, kv as k has it.
        dtype: of the inputs and the gradients.
        causal: bottom-right aligned causal mask.
        strategy, group_split: the order asked for; ``"auto"`` and 0 leave it to dash.
        window_left, window_right: keys that a query sees before and after its own place, which is
            its row + seqlen_k - seqlen_q; None: all of them.
        device: whose residency and name a plan goes by; the CPU stands for a model of an H200.
        head_dim_v: of v, out and dout; None, and only None, where it is that of q and k.
    """

    q_shape: tuple[int, ...]
    kv_shape: tuple[int, ...]
    dtype: torch.dtype
    causal: bool = False
    strategy: str = "auto"
    group_split: int = 0
    window_left: int | None = None
    window_right: int | None = None
    device: torch.device = torch.device("cpu")
    head_dim_v: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of q and k, and of v."""
        head_dim = self.q_shape[3]
        return head_dim, head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def v_shape(self) -> tuple[int, ...]:
        """``(batch, seqlen_k, kv_heads, head_dim_v)``."""
        return *self.kv_shape[:3], self.head_dims[1]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no sequence, no query or no key."""
        return 0 in self.q_shape or 0 in self.kv_shape

    @property
    def one_sequence(self) -> Problem:
        """The problem of one sequence alone, which decides the order for every batch."""
        return self._replace(q_shape=(1, *self.q_shape[1:]), kv_shape=(1, *self.kv_shape[1:]))

    @property
    def mask(self) -> Mask:
        lengths = self.q_shape[1], self.kv_shape[1]
        return Mask.of(*lengths, self.causal, self.window_left, self.window_right)

    def in_tiles(self, group_split: int | None = None) -> object:
        """The ``_C.Problem`` of it, groups cut into ``group_split`` parts (``make_problem``)."""
        split = self.group_split if group_split is None else group_split
        return make_problem(
            self.q_shape,
            self.kv_shape,
            self.causal,
            split or 1,
            window_left=self.window_left,
            window_right=self.window_right,
            head_dim_v=self.head_dim_v,
        )


def head_dim_v(q_shape: Sequence[int], v_shape: Sequence[int]) -> int | None:
    """``Problem.head_dim_v`` of these tensors."""
    return None if v_shape[-1] == q_shape[-1] else v_shape[-1]


def make_problem(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    causal: bool,
    group_split: int = 1,
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    head_dim_v: int | None = None,
) -> object:
    """The ``_C.Problem`` of ``(batch, seqlen, heads, head_dim)`` shapes, with the kernel's tiles.

    Raises:
        ValueError: a size is not positive or too large, or the head dimension has no kernel.
    """
    tile_q, tile_kv = extension().tile_shape(q_shape[3], head_dim_v)
    windows = {"window_left": window_left, "window_right": window_right}
    return extension().Problem(
        batch=q_shape[0],
        heads=q_shape[2],
        kv_heads=kv_shape[2],
        seqlen_q=q_shape[1],
        seqlen_k=kv_shape[1],
        causal=causal,
        tile_q=tile_q,
        tile_kv=tile_kv,
        group_split=group_split,
        **{name: _keys(keys) for name, keys in windows.items()},
    )


def _keys(window: int | None) -> int:
    """A side of a window as ``_C.Problem`` has it."""
    return -1 if window is None else min(window, 2**30)
