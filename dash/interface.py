"""``dash.attention``: attention whose gradients are bit for bit the same on every run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dash import ops, support
from dash.derivatives import (
    call_below_autograd,
    define_batching,
    define_derivative,
    raise_no_derivative,
)
from dash.forward import ForwardCall, run_forward
from dash.remembered import Remembered
from dash.sink import add_sink, attention_sink_bwd, sink_reasons

torch.library.define(
    "dash::attention_fwd",
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False, "
    'str strategy="auto", int group_split=0, int? window_left=None, int? window_right=None, '
    'str forward="auto", Tensor? sink=None) -> (Tensor out, Tensor softmax_lse)',
    tags=torch.Tag.pt2_compliant_tag,
)

OutAndLse = tuple[torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    sink: torch.Tensor | None = None,
    forward: str = "auto",
    strategy: str = "auto",
    group_split: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | OutAndLse:
    """softmax(q kᵀ · softmax_scale) v, differentiable through ``dash::attention_bwd``.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, bfloat16 or float16. Under autocast float32 is
            cast to autocast's dtype, as for ``scaled_dot_product_attention``.
        k, v: ``(batch, seqlen_k, kv_heads, head_dim)``; ``heads`` is a multiple of ``kv_heads``.
            v may have another last size, ``head_dim_v``.
        causal: query row r sees key columns 0 … r + seqlen_k − seqlen_q (bottom-right aligned).
        softmax_scale: a number; defaults to ``head_dim ** -0.5``.
        window_left, window_right: query row r sees only the key columns from
            r + seqlen_k − seqlen_q − window_left to r + seqlen_k − seqlen_q + window_right. None:
            no bound on that side. Together with ``causal``: what both show.
        sink: ``(heads,)``, floating point: one more logit for each head in the softmax's
            denominator. Differentiable.
        forward: which forward pass runs: ``"auto"``, the best one present, or its name in
            ``dash.forward``.
        strategy, group_split: order of the gradients' sums; see ``dash.plan``.
        return_lse: also return the logsumexp of the scaled scores, the sink among them.
            Differentiable.

    Returns:
        ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype; with ``return_lse`` also fp32
        ``(batch, heads, seqlen_q)``, ±inf for rows without keys, or the sink where there is one.

    Raises:
        UnsupportedError: the forward asked for or the backward could not run, checked before the
            forward does.
        NotImplementedError: when a second or a forward-mode derivative is taken.
    """
    q, k, v, softmax_scale = as_used(q, k, v, softmax_scale)
    arguments = (q, k, v, softmax_scale, causal, strategy, group_split, window_left, window_right)
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        out, lse = torch.ops.dash.attention_fwd.default(*arguments, forward, sink)
    else:
        out, lse = _Attention.apply(*arguments, forward, sink)
    return (out, lse) if return_lse else out


def as_used(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]:
    """The inputs in the dtypes and the scale as the number that the operators take.

    Raises:
        UnsupportedError: q, k or v is no tensor, or softmax_scale no number.
    """
    support.check_tensors(q=q, k=k, v=v)
    if not (softmax_scale is None or isinstance(softmax_scale, float)):
        found = list(support.scale_reasons(softmax_scale))
        if found:
            raise support.UnsupportedError(found)
        softmax_scale = float(softmax_scale)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if t.dtype == torch.float32 else t for t in (q, k, v))
    return q, k, v, softmax_scale


class Call(NamedTuple):
    """The operator's arguments, in the order of its schema."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float | None = None
    causal: bool = False
    strategy: str = "auto"
    group_split: int = 0
    window_left: int | None = None
    window_right: int | None = None
    forward: str = "auto"
    sink: torch.Tensor | None = None

    def check(self) -> None:
        """Raises ``UnsupportedError`` with every reason why the backward could not run."""
        support.check_tensors(q=self.q, k=self.k, v=self.v)
        names = Call._fields[3:9]
        found = support.reasons(*self[:3], **dict(zip(names, self[3:9], strict=True)))
        if self.sink is not None and self.q.dim() == 4:
            found += sink_reasons(self.sink, self.q.shape[2], self.q.device)
        if found:
            raise support.UnsupportedError(found)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:3], self.v.shape[3]

    @property
    def key(self) -> support.Key:
        """All that the checks look at but softmax_scale."""
        tensors = self[:3] if self.sink is None else (*self[:3], self.sink)
        return support.key_of(tensors, self[4:9])

    def keyless(self) -> torch.Tensor | None:
        """``(seqlen_q,)`` bool: rows that see no key; None where there are none."""
        mask = self.forward_call().mask
        if mask.keyless_rows == 0:
            return None
        return torch.arange(mask.seqlen_q, device=self.q.device) < mask.keyless_rows

    def forward_call(self) -> ForwardCall:
        scale = self.q.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        return ForwardCall(*self[:3], scale, self.causal, self.window_left, self.window_right)


_checked: dict[support.Key, bool] = Remembered(4096)


def _attention_fwd(*arguments: object) -> OutAndLse:
    call = Call(*arguments)
    support.check_once(call, _checked)
    q, k = call.q, call.k
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        out = q.new_zeros(call.out_shape)
    else:
        out, lse = run_forward(call.forward_call(), call.forward)
    return (out, lse) if call.sink is None else add_sink(out, lse, call.sink, call.keyless())


torch.library.impl("dash::attention_fwd", ("cpu", "cuda"), _attention_fwd)


@torch.library.register_fake("dash::attention_fwd")
def _attention_fwd_fake(*arguments: object) -> OutAndLse:
    call = Call(*arguments)
    batch, seqlen_q, heads, _ = call.q.shape
    lse = call.q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    return call.q.new_empty(call.out_shape), lse


class _Attention(torch.autograd.Function):
    """The derivative of attention; a Function, because torch.func knows what to do with those."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: object) -> OutAndLse:
        return call_below_autograd(torch.ops.dash.attention_fwd.default, arguments)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple, output: OutAndLse) -> None:
        call = Call(*inputs)
        ctx.arguments = call[3:9]
        ctx.save_for_backward(*call[:3], *output, call.sink)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: object, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(Call._fields)
        *tensors, sink = ctx.saved_tensors
        q, k, v, out, lse = tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = ops.attention_bwd(dout, *tensors, *ctx.arguments, dlse)
        dsink = None
        if sink is not None:
            keyless = Call(q, k, v, *ctx.arguments).keyless()
            dsink = attention_sink_bwd(dout, out, lse, sink, dlse, keyless)
        return *gradients, *(None,) * 7, dsink

    @staticmethod
    def jvp(ctx: object, *tangents: torch.Tensor | None) -> None:
        raise_no_derivative("dash.attention", "a forward-mode derivative")


define_derivative("dash::attention_fwd", _Attention, _attention_fwd)
define_batching("dash::attention_fwd", fold=False)  # forwards are not ours
