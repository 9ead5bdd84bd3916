"""``dash.attention_varlen``: attention over packed sequences, deterministic in each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dash import support
from dash.derivatives import (
    call_below_autograd,
    define_batching,
    define_derivative,
    raise_no_derivative,
)
from dash.interface import as_used
from dash.remembered import Remembered
from dash.sink import add_sink, attention_sink_bwd, sink_reasons
from dash.varlen import checks
from dash.varlen.forward import Pack, run_forward
from dash.varlen.ops import attention_varlen_bwd
from dash.varlen.rows import keyless_rows, owners

torch.library.define(
    "dash::attention_varlen_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "
    "bool causal=False, int? window_left=None, int? window_right=None, Tensor? seqused_q=None, "
    'Tensor? seqused_k=None, str strategy="auto", int group_split=0, str forward="auto", '
    "Tensor? sink=None) -> (Tensor out, Tensor softmax_lse)",
    tags=torch.Tag.pt2_compliant_tag,
)

OutAndLse = tuple[torch.Tensor, torch.Tensor]


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    forward: str = "auto",
    strategy: str = "auto",
    group_split: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · softmax_scale) v in each of many sequences that lie one behind the other.

    Differentiable through ``dash::attention_varlen_bwd``: the gradients of a sequence are bit for
    bit those of a dense call on it alone (for the same out and lse), for every packing. Nothing
    waits for the device, but the plain forward on a GPU.

    Args:
        q: ``(total_q, heads, head_dim)``, bfloat16 or float16. Under autocast float32 is cast to
            autocast's dtype, as for ``scaled_dot_product_attention``.
        k, v: ``(total_k, kv_heads, head_dim)``; ``heads`` is a multiple of ``kv_heads``. v may
            have another last size, ``head_dim_v``.
        cu_seqlens_q: int32 ``(batch + 1,)`` on q's device: the first row of each sequence, then the
            end of the last. Starts with 0 and does not decrease. Rows behind the last entry belong
            to no sequence: zeros in out and in all gradients, whatever the inputs hold there.
        cu_seqlens_k: the same for k and v; None: that of q.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Forwards of others need an int; for None
            or a 0-d tensor (never read) they get the number of rows. Changes no bit.
        causal: row r of a sequence sees its keys 0 … r + seqlen_k − seqlen_q.
        softmax_scale: a number; defaults to ``head_dim ** -0.5``.
        window_left, window_right: how many keys left and right of that diagonal a row sees; None:
            all of them. A window that no row of a sequence notices is as none, for that sequence.
        seqused_q, seqused_k: int32 ``(batch,)``: sequences shorter than their space. The rows
            between are zeros in out and in all gradients.
        sink: ``(heads,)``, floating point: one more logit for each head in the softmax's
            denominator. Differentiable.
        forward: ``"auto"``, or a name of ``dash.varlen.forward.FORWARDS``.
        strategy, group_split: order of the gradients' sums; see ``dash.plan_varlen``.
        return_lse: also return the logsumexp of the scaled scores, the sink among them.
            Differentiable.

    Returns:
        ``(total_q, heads, head_dim_v)`` in q's dtype; with ``return_lse`` also fp32 ``(heads,
        total_q)``, ±inf, or the sink, for rows without keys and rows of no sequence.

    Raises:
        UnsupportedError: the backward could not run, checked before the forward does. What
            ``cu_seqlens`` holds is checked on the CPU alone.
        NotImplementedError: when a second or a forward-mode derivative is taken.
    """
    q, k, v, softmax_scale = as_used(q, k, v, softmax_scale)
    bounds = (None if isinstance(m, torch.Tensor) else m for m in (max_seqlen_q, max_seqlen_k))
    arguments = (
        q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, *bounds,
        softmax_scale, causal, window_left, window_right, seqused_q, seqused_k, strategy,
        group_split, forward, sink,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        out, lse = torch.ops.dash.attention_varlen_fwd.default(*arguments)
    else:
        out, lse = _AttentionVarlen.apply(*arguments)
    return (out, lse) if return_lse else out


class Call(NamedTuple):
    """The operator's arguments, in the order of its schema."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    strategy: str = "auto"
    group_split: int = 0
    forward: str = "auto"
    sink: torch.Tensor | None = None

    def check(self) -> None:
        """Raises ``UnsupportedError`` with every reason why the backward could not run."""
        support.check_tensors(**dict(zip(self._fields[:5], self[:5], strict=True)))
        found = checks.reasons(
            *self[:5], seqused_q=self.seqused_q, seqused_k=self.seqused_k,
            softmax_scale=self.softmax_scale, causal=self.causal, strategy=self.strategy,
            group_split=self.group_split, window_left=self.window_left,
            window_right=self.window_right,
        )  # fmt: skip
        if self.sink is not None and self.q.dim() == 3:
            found += sink_reasons(self.sink, self.q.shape[1], self.q.device)
        if found:
            raise support.UnsupportedError(found)

    def pack(self) -> Pack:
        scale = self.q.shape[2] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        return Pack(*self[:7], scale, *self[8:13])

    @property
    def key(self) -> support.Key:
        """All that the checks look at but softmax_scale."""
        tensors = (*self[:5], *(t for t in (*self[11:13], self.sink) if t is not None))
        there = self.seqused_q is None, self.sink is None
        return support.key_of(tensors, (*there, *self[8:11], *self[13:15]))

    def inside_and_keyless(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bool ``(total_q,)`` each: rows of sequences, and rows that see no key."""
        of_q = owners(self.cu_seqlens_q, self.seqused_q, self.q.shape[0])
        lengths = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k
        right = 0 if self.causal else self.window_right
        return of_q.inside, keyless_rows(of_q, *lengths, right)


_checked: dict[support.Key, bool] = Remembered(1024)


def _attention_varlen_fwd(*arguments: object) -> OutAndLse:
    call = Call(*arguments)
    support.check_once(call, _checked)
    q = call.q
    if q.numel() == 0 or call.k.numel() == 0 or call.cu_seqlens_q.shape[0] == 1:
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        out, keyless = q.new_zeros((*q.shape[:2], call.v.shape[2])), None
    else:
        out, lse = run_forward(call.pack(), call.forward)
        keyless = None if call.sink is None else call.inside_and_keyless()[1]
    if call.sink is None:
        return out, lse
    one = add_sink(out[None], lse[None], call.sink, keyless)
    return tuple(t[0] for t in one)


torch.library.impl("dash::attention_varlen_fwd", ("cpu", "cuda"), _attention_varlen_fwd)


@torch.library.register_fake("dash::attention_varlen_fwd")
def _attention_varlen_fwd_fake(*arguments: object, **named: object) -> OutAndLse:
    call = Call(*arguments, **named)
    total_q, heads, _ = call.q.shape
    lse = call.q.new_empty((heads, total_q), dtype=torch.float32)
    return call.q.new_empty((total_q, heads, call.v.shape[2])), lse


class _AttentionVarlen(torch.autograd.Function):
    """The derivative of attention; a Function, because torch.func knows what to do with those."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: object) -> OutAndLse:
        return call_below_autograd(torch.ops.dash.attention_varlen_fwd.default, arguments)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple, output: OutAndLse) -> None:
        call = Call(*inputs)
        out, lse = output
        # The bounds stay behind: the backward never looks at them.
        ctx.mask = call[7:11]
        ctx.order = call.strategy, call.group_split
        ctx.save_for_backward(*call[:3], out, lse, *call[3:5], *call[11:13], call.sink)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: object, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(Call._fields)
        *tensors, seqused_q, seqused_k, sink = ctx.saved_tensors
        q, k, v, out, lse, *lengths = tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = attention_varlen_bwd(
            dout, *tensors, None, None, *ctx.mask, seqused_q, seqused_k, *ctx.order, dlse
        )
        dsink = None
        if sink is not None:
            call = Call(q, k, v, *lengths, None, None, *ctx.mask, seqused_q, seqused_k)
            inside, keyless = call.inside_and_keyless()
            if dlse is not None:  # nothing is read that rows of no sequence hold
                dlse = dlse.masked_fill(~inside, 0.0)[None]
            dsink = attention_sink_bwd(dout[None], out[None], lse[None], sink, dlse, keyless)
        return *gradients, *(None,) * 13, dsink

    @staticmethod
    def jvp(ctx: object, *tangents: torch.Tensor | None) -> None:
        raise_no_derivative("dash.attention_varlen", "a forward-mode derivative")


define_derivative("dash::attention_varlen_fwd", _AttentionVarlen, _attention_varlen_fwd)
define_batching("dash::attention_varlen_fwd", fold=False)  # forwards are not ours
