"""Attention sinks: one more logit a head in the softmax's denominator, after the forward is done.

With lse' = logaddexp(lse, sink) and out' = out · exp(lse − lse') the ordinary backward is that of
attention with the sink, and with delta = rowsum(dO ∘ out') − dlse, where dlse is a gradient of
lse', the sink's own gradient is −Σ exp(sink − lse') · delta over all rows of its head.

Both are operators, so that no compiler takes their sums in an order of its own. Layouts are those
of a dense call; a packed one is a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dash.derivatives import define_batching, define_without_derivative

OutAndLse = tuple[torch.Tensor, torch.Tensor]


def sink_reasons(
    sink: object, heads: int, device: torch.device, name: str = "sink"
) -> Iterator[str]:
    """Why ``sink`` cannot be one: a floating-point tensor ``(heads,)`` on the device of q."""
    if not isinstance(sink, torch.Tensor):
        yield f"{name} is a {type(sink).__name__}; required: a torch.Tensor or None"
        return
    if not sink.is_floating_point():
        yield f"{name} has dtype {sink.dtype}; required: a floating-point dtype"
    if tuple(sink.shape) != (heads,):
        yield f"{name} has shape {tuple(sink.shape)}; required: ({heads},), one value a q head"
    if sink.device != device:
        yield f"{name} is on {sink.device}; required: {device}, the device of q"


def add_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, keyless: torch.Tensor | None = None
) -> OutAndLse:
    """out' and lse'.

    Args:
        out: ``(batch, seqlen_q, heads, head_dim)``.
        lse: fp32 ``(batch, heads, seqlen_q)``.
        sink: ``(heads,)``.
        keyless: bool that broadcasts to lse, true in rows that see no key; None: there are none.
            Their lse is taken as -inf, whatever the forward made of them.
    """
    if keyless is not None:
        lse = lse.masked_fill(keyless, -torch.inf)
    # In fp64, rounded once: in fp32 a value's last bit depends on its place in memory on a CPU,
    # which has vector and scalar code of exp and log, and so on how sequences are packed.
    lse = lse.double()
    with_sink = torch.logaddexp(lse, sink.double()[:, None])
    # Where both are -inf there is neither key nor sink, and their difference would be NaN.
    weight = torch.where(lse == with_sink, 1.0, torch.exp(lse - with_sink)).float()
    return (out * weight.transpose(1, 2)[..., None]).to(out.dtype), with_sink.float()


torch.library.define(
    "dash::attention_sink_bwd",
    "(Tensor dout, Tensor out, Tensor softmax_lse, Tensor sink, Tensor? dlse=None, "
    "Tensor? keyless=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.register_fake("dash::attention_sink_bwd")
def _attention_sink_bwd_fake(
    dout: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor, sink: torch.Tensor, *_: object
) -> torch.Tensor:
    return sink.new_empty(sink.shape)


def _attention_sink_bwd(
    dout: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    sink: torch.Tensor,
    dlse: torch.Tensor | None = None,
    keyless: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of sink ``(heads,)``; out and softmax_lse are those with it."""
    delta = (dout.float() * out.float()).sum(-1, dtype=torch.float32).transpose(1, 2)
    if keyless is not None:  # what dout holds there is not read
        delta = delta.masked_fill(keyless, 0.0)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sink.float()[:, None] - softmax_lse)
    # exp(-inf - -inf): neither key nor sink, and 0 · NaN: a share of nothing.
    terms = torch.where(sink.float()[:, None] == -torch.inf, 0.0, share * -delta)
    return tree_sum(terms.transpose(0, 1).flatten(1)).to(sink.dtype)


torch.library.impl("dash::attention_sink_bwd", ("cpu", "cuda"), _attention_sink_bwd)

# As an autograd Function calls it.
attention_sink_bwd = define_without_derivative("dash::attention_sink_bwd")
define_batching("dash::attention_sink_bwd", fold=False)


def tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension by halves: one order of additions on every device."""
    while (n := terms.shape[-1]) > 1:
        half = n // 2
        pairs = terms[..., :half] + terms[..., half : 2 * half]
        terms = pairs if n % 2 == 0 else torch.cat((pairs, terms[..., -1:]), -1)
    return terms[..., 0] if terms.shape[-1] else terms.new_zeros(terms.shape[:-1])
