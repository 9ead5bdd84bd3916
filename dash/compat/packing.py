"""Batches that hold several sequences, or padding, as packed calls of dash.

Nothing here waits for the device except ``document_starts``, which must know how many documents
there are.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

import dash


@dataclass(frozen=True)
class Packing:
    """How the tokens of ``(batch, seqlen, …)`` tensors form sequences.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: ``(sequences + 1,)`` bounds among the packed tokens.
        max_seqlen_q, max_seqlen_k: bounds of the lengths, ints or tensors, or None.
        q_order, k_order: ``(batch · seqlen,)``: which token comes where, for tokens that do not lie
            as packed; all that ``cu_seqlens`` does not cover are last.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | torch.Tensor | None = None
    max_seqlen_k: int | torch.Tensor | None = None
    q_order: torch.Tensor | None = None
    k_order: torch.Tensor | None = None

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rules: object
    ) -> torch.Tensor:
        """``dash.attention_varlen`` of ``(batch, seqlen, heads, head_dim)`` tensors."""
        tokens = query.shape[:2]
        if self.k_order is not None:  # a mask shorter than a static cache says where keys end
            rows = self.k_order.shape[0] // key.shape[0]
            key, value = key[:, :rows], value[:, :rows]
        query = _take(query.flatten(0, 1), self.q_order)
        key, value = (_take(t.flatten(0, 1), self.k_order) for t in (key, value))
        out = dash.attention_varlen(
            query,
            key,
            value,
            self.cu_seqlens_q.to(torch.int32),
            self.cu_seqlens_k.to(torch.int32),
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            **rules,
        )
        back = None if self.q_order is None else self.q_order.argsort()
        return _take(out, back).unflatten(0, tokens)


def unpadding(attention_mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> Packing:
    """The packing of a padded batch.

    Args:
        attention_mask: ``(batch, seqlen)``, nonzero where a token counts, on any side of padding.
        seqlen_q: queries of a row: the last ones of the mask's.
        seqlen_k: keys of a row; those that the mask does not reach do not count.
    """
    kept = attention_mask.bool()[:, :seqlen_k]
    cu_seqlens_k, k_order = _packed_order(kept)
    if seqlen_q == kept.shape[1]:
        return Packing(cu_seqlens_k, cu_seqlens_k, seqlen_q, seqlen_q, k_order, k_order)
    cu_seqlens_q, q_order = _packed_order(kept[:, -seqlen_q:])
    return Packing(cu_seqlens_q, cu_seqlens_k, seqlen_q, kept.shape[1], q_order, k_order)


def packing_of_positions(
    position_ids: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> Packing | None:
    """The packing of rows whose position ids restart; None where each row is one document.

    ``query`` and ``key`` are ``(batch, seqlen, heads, head_dim)``. With more keys than queries
    (a cache) position ids cannot say which keys belong together, and count as one document. They
    are read once for all layers of a forward pass, which get the same tensor.
    """
    if position_ids is None or position_ids.dim() != 2:
        return None
    if not position_ids.shape[1] == query.shape[1] == key.shape[1] > 1:
        return None
    bounds = _LAST_POSITIONS.bounds(position_ids, query.shape[0])
    return None if bounds is None else Packing(bounds, bounds)


def document_starts(documents: torch.Tensor) -> torch.Tensor:
    """int32 ``cu_seqlens`` of all rows' tokens in a line; waits for the device.

    Args:
        documents: ``(batch, seqlen)`` integers, equal in neighbours of one document.
    """
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    end = starts.new_full((1,), documents.numel())
    return torch.cat([starts, end]).to(torch.int32)


class _LastPositions:
    """The bounds of the position ids that were asked for last."""

    def __init__(self) -> None:
        # (ids, version, batch, bounds): one value, so that threads never see parts of two.
        self._last: tuple[weakref.ref, int, int, torch.Tensor | None] | None = None

    @torch.compiler.disable
    def bounds(self, position_ids: torch.Tensor, batch: int) -> torch.Tensor | None:
        """int32 ``cu_seqlens`` of ``batch`` rows, or None where each is one document."""
        if position_ids.is_inference():  # has no version that would tell of a change in place
            return _bounds(position_ids, batch)
        last = self._last
        if last is not None and last[0]() is position_ids:
            _, *rest, bounds = last
            if rest == [position_ids._version, batch]:
                return bounds
        bounds = _bounds(position_ids, batch)
        self._last = weakref.ref(position_ids), position_ids._version, batch, bounds
        return bounds


def _bounds(position_ids: torch.Tensor, batch: int) -> torch.Tensor | None:
    rows = position_ids.expand(batch, -1)
    jumps = torch.diff(rows, dim=-1, prepend=rows[:, :1] - 1) != 1
    bounds = document_starts(jumps.cumsum(-1))
    return bounds if len(bounds) > batch + 1 else None


_LAST_POSITIONS = _LastPositions()


def _packed_order(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``cu_seqlens`` of the tokens that a ``(batch, seqlen)`` mask keeps, and their order."""
    lengths = kept.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, (~kept).flatten().to(torch.uint8).argsort(stable=True)


def _take(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return rows if order is None else _Permutation.apply(rows, order)


class _Permutation(torch.autograd.Function):
    """``rows[order]``, whose gradient is another gather: indexing's own adds with atomics."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order.argsort()), None
