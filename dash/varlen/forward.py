"""Forward passes that ``dash.attention_varlen`` may call; none of them is ours but the last.

``forward="auto"`` takes the first of ``FORWARDS`` that can run:

1. ``fa3``: the package of FlashAttention-3 (``flash_attn_interface``);
2. ``flash``: the FlashAttention-2 kernel that PyTorch holds, ``aten::_flash_attention_forward``;
3. ``plain``: plain PyTorch, a sequence at a time. On a GPU it waits for ``cu_seqlens``.

The first two want ``max_seqlen`` as an int. Where there is none, or a tensor, which to read would
wait for the device, they get the bound that the shapes give: all rows of the pack. That costs empty
CTAs, no bit. They trust ``cu_seqlens``, and know no gaps between sequences: with ``seqused`` they
get a copy without gaps.

All return ``out`` ``(total_q, heads, head_dim_v)`` in q's dtype and ``lse`` ``(heads, total_q)``
fp32, ±inf for rows without keys. Such rows, and rows of no sequence, have zeros in ``out``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from dash.forward import (
    SMALLEST_SCALE,
    fa3_package,
    is_of_the_device,
    needs_positive_scale,
    plain_forward,
    takes_return_attn_probs,
    why_no_fa3,
)
from dash.head_dims import Kind, kind_of_kernel, refused_by_fa3, why_not_fa3, with_one_head_dim
from dash.memory import contiguous
from dash.support import UnsupportedError
from dash.varlen.rows import close_gaps, owners, rows_of_none
from dash.varlen.sequences import sequences_by_length

# Sequences are the y dimension of FlashAttention-2's grid.
_FLASH_MAX_SEQUENCES = 65_535


class Pack(NamedTuple):
    """Queries, keys and values of packed sequences, and how they see each other.

    Attributes:
        q, k, v: ``(total, heads, head_dim)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``.
        max_seqlen_q, max_seqlen_k: upper bounds; None: unknown.
        scale: factor on the scores.
        causal, window_left, window_right: the mask of each sequence.
        seqused_q, seqused_k: int32 ``(batch,)`` or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    scale: float
    causal: bool
    window_left: int | None
    window_right: int | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def window_sizes(self) -> tuple[int | None, int | None]:
        """Left and right as int32, which kernels of others hold; causal is right = 0."""
        right = 0 if self.causal else self.window_right
        return tuple(None if w is None else min(w, 2**31 - 1) for w in (self.window_left, right))

    @property
    def bounds(self) -> tuple[int, int]:
        """max_seqlen of q and of k as ints."""
        given = self.max_seqlen_q, self.max_seqlen_k
        totals = self.q.shape[0], self.k.shape[0]
        return tuple(
            total if bound is None else min(bound, total)
            for bound, total in zip(given, totals, strict=True)
        )


OutAndLse = tuple[torch.Tensor, torch.Tensor]


class Forward(NamedTuple):
    """A forward pass: why it cannot run a pack (None: it can), and the pass."""

    why_not: Callable[[Pack], str | None]
    run: Callable[[Pack], OutAndLse]


def run_forward(pack: Pack, forward: str = "auto") -> OutAndLse:
    """out and lse by the forward of that name, or by the first that can.

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this pack.
    """
    name = choose_forward(pack, forward)
    if name != "fa3":
        return FORWARDS[name].run(pack)
    try:
        return FORWARDS[name].run(pack)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if is_of_the_device(error):
            raise
        _note_fa3_failure(pack, error)
    return run_forward(pack, forward)


def choose_forward(pack: Pack, forward: str = "auto") -> str:
    """The name of the first forward that can run the pack, or of the one asked for.

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this pack.
    """
    if forward == "auto":
        return next(name for name, one in FORWARDS.items() if one.why_not(pack) is None)
    if forward not in FORWARDS:
        known = ", ".join(map(repr, ("auto", *FORWARDS)))
        raise UnsupportedError([f"forward is {forward!r}; required: one of {known}"])
    reason = FORWARDS[forward].why_not(pack)
    if reason is not None:
        raise UnsupportedError([f"forward is {forward!r}, and {reason}"])
    return forward


# What this build of FlashAttention-3 was seen to lack, and what it said.
_fa3_lacks: dict[Kind, str] = {}


def _why_no_fa3(pack: Pack) -> str | None:
    if pack.q.device.type != "cuda":
        return f"q is on {pack.q.device}; required: a CUDA device"
    if fa3_package() is None:
        return why_no_fa3()
    if not hasattr(fa3_package(), "flash_attn_varlen_func"):
        return "flash_attn_interface has no flash_attn_varlen_func"
    if pack.scale < SMALLEST_SCALE:
        return needs_positive_scale(pack.scale)
    kind = kind_of_kernel(pack.q, pack.v)
    return why_not_fa3(kind) or _fa3_lacks.get(kind)


def _note_fa3_failure(pack: Pack, error: Exception) -> None:
    kind = kind_of_kernel(pack.q, pack.v)
    _fa3_lacks[kind] = refused_by_fa3(kind, error)
    warnings.warn(
        f"dash.attention_varlen: {_fa3_lacks[kind]}; another forward is taken",
        RuntimeWarning,
        stacklevel=3,
    )


def _why_no_flash(pack: Pack) -> str | None:
    if pack.q.device.type != "cuda":
        return f"q is on {pack.q.device}; required: a CUDA device"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without flash attention"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "PyTorch's flash attention is switched off"
    sequences = pack.cu_seqlens_q.shape[0] - 1
    if sequences > _FLASH_MAX_SEQUENCES:
        return f"there are {sequences} sequences; required: at most {_FLASH_MAX_SEQUENCES}"
    return needs_positive_scale(pack.scale) if pack.scale < SMALLEST_SCALE else None


def _fa3(pack: Pack) -> OutAndLse:
    function = fa3_package().flash_attn_varlen_func
    more = {"return_attn_probs": True} if takes_return_attn_probs(function) else {}
    max_seqlen_q, max_seqlen_k = pack.bounds
    out, lse, *_ = function(
        pack.q, pack.k, pack.v, cu_seqlens_q=pack.cu_seqlens_q, cu_seqlens_k=pack.cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=pack.scale,
        causal=pack.causal,
        window_size=tuple(-1 if w is None else w for w in pack.window_sizes),
        **more,
    )  # fmt: skip
    return out, lse


def _flash(pack: Pack) -> OutAndLse:
    left, right = pack.window_sizes
    max_seqlen_q, max_seqlen_k = pack.bounds
    # With a bound of one row it takes each sequence to have one, and reads lse's rows otherwise.
    max_seqlen_q = max(max_seqlen_q, 2)
    last_dim_dense = (
        t if t.stride(-1) == 1 else t.contiguous() for t in with_one_head_dim(*pack[:3])
    )
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *last_dim_dense, pack.cu_seqlens_q, pack.cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
        pack.causal, False, scale=pack.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return contiguous(out[..., : pack.v.shape[2]]), lse


def _without_gaps(kernel: Callable[[Pack], OutAndLse]) -> Callable[[Pack], OutAndLse]:
    """``kernel`` for packs with ``seqused`` too, with zeros in the rows of no sequence."""

    def run(pack: Pack) -> OutAndLse:
        cu_seqlens = pack.cu_seqlens_q, pack.cu_seqlens_k
        cu_seqlens_q, cu_seqlens_k = (cu.contiguous() for cu in cu_seqlens)
        q, k, v, back = pack.q, pack.k, pack.v, None
        if pack.seqused_q is not None:
            cu_seqlens_q, (q,), back = close_gaps(cu_seqlens_q, pack.seqused_q, q)
        if pack.seqused_k is not None:
            cu_seqlens_k, (k, v), _ = close_gaps(cu_seqlens_k, pack.seqused_k, k, v)
        out, lse = kernel(
            pack._replace(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        )
        if lse.dim() == 3:  # (batch, heads, max_seqlen_q), as PyTorch had it for a while
            packed = owners(cu_seqlens_q, None, q.shape[0])
            in_bound = packed.position.clamp(max=lse.shape[2] - 1)
            lse = lse[packed.sequence, :, in_bound].mT
        if back is not None:
            out, lse = out[back], lse[:, back]
        outside = rows_of_none(pack.cu_seqlens_q, pack.seqused_q, q.shape[0])
        out, lse = contiguous(out), contiguous(lse)
        return out.masked_fill_(outside[:, None, None], 0.0), lse.masked_fill_(outside, -torch.inf)

    return run


def _plain(pack: Pack) -> OutAndLse:
    """The dense plain forward on each sequence alone: no sequence changes another's bits."""
    out = pack.q.new_zeros((*pack.q.shape[:2], pack.v.shape[2]))
    lse = pack.q.new_full((pack.q.shape[1], pack.q.shape[0]), -torch.inf, dtype=torch.float32)
    for sequences in sequences_by_length(
        pack.cu_seqlens_q, pack.cu_seqlens_k, pack.seqused_q, pack.seqused_k,
        pack.q.shape[0], pack.k.shape[0],
    ):  # fmt: skip
        if sequences.empty:
            continue
        for rows_q, rows_k in zip(sequences.rows_q, sequences.rows_k, strict=True):
            q, k, v = pack.q[rows_q][None], pack.k[rows_k][None], pack.v[rows_k][None]
            one, one_lse = plain_forward(q, k, v, pack.scale, *pack[8:11])
            out[rows_q], lse[:, rows_q] = one[0], one_lse[0]
    return out, lse


FORWARDS = {
    "fa3": Forward(_why_no_fa3, _without_gaps(_fa3)),
    "flash": Forward(_why_no_flash, _without_gaps(_flash)),
    "plain": Forward(lambda pack: None, _plain),
}

# What is known of each: whether a sequence's bits depend on the pack.
KNOWN = {
    "fa3": "bits of a sequence are not promised to be the same in every pack",
    "flash": "never split over keys: the bits of a sequence do not depend on the pack",
    "plain": "a sequence at a time: the bits of its dense call",
}


def planned_forward(
    q_shape: tuple[int, int, int],
    kv_shape: tuple[int, int, int],
    dtype: torch.dtype,
    batch: int,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    device: torch.device,
    forward: str = "auto",
    head_dim_v: int | None = None,
) -> str:
    """The name of the forward that ``dash.attention_varlen`` takes, without running it.

    For contiguous inputs and the default scale, as PyTorch's switches are now.

    Raises:
        UnsupportedError: there is no such forward, or it cannot run this pack.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not for the operator

    with FakeTensorMode():
        q, kv = (torch.empty(shape, dtype=dtype, device=device) for shape in (q_shape, kv_shape))
        v = kv if head_dim_v is None else kv.new_empty((*kv_shape[:2], head_dim_v))
        cu_seqlens = torch.empty(batch + 1, dtype=torch.int32, device=device)
    mask = causal, window_left, window_right
    pack = Pack(q, kv, v, cu_seqlens, cu_seqlens, None, None, 1.0, *mask, None, None)
    return choose_forward(pack, forward)
