"""PyTorch's registry of flash attentions: dash's backward under torch's own functions.

    import dash.compat.torch_attention
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    dash.compat.torch_attention.register()
    activate_flash_attention_impl("DASH")      # restore_flash_attention_impl() ends it

From then on the backward of ``scaled_dot_product_attention``, of ``varlen_attn`` and of jagged
NestedTensors runs in dash wherever torch takes its flash kernel, and of the first also where it
takes cuDNN's, which it prefers on Hopper. The forward stays torch's. Calls for which torch takes
its memory-efficient or math implementation (an ``attn_mask``, float32) are not flash attention and
stay as they are; ``torch.nn.attention.sdpa_kernel`` forbids them. Dropout, and cuDNN with a bias,
raise ``dash.UnsupportedError`` in the backward.
"""

from __future__ import annotations

import warnings

import torch

from dash.compat.arguments import refuse, window

NAME = "DASH"

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register(name: str = NAME) -> None:
    """Adds dash to torch's list of implementations; nothing changes before it is activated.

    Raises:
        ImportError: torch is older than 2.10, which has no such list.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"torch is {torch.__version__}; required: 2.10 or newer, which has "
            "torch.nn.attention.register_flash_attention_impl"
        ) from error
    register_flash_attention_impl(name, register_fn=Overrides)


class Overrides:
    """dash in the place of torch's backward kernels of one dispatch key, until ``remove``."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, function in (
            ("_flash_attention_backward", _flash_backward),
            ("_scaled_dot_product_flash_attention_backward", _sdpa_flash_backward),
            ("_scaled_dot_product_cudnn_attention_backward", _sdpa_cudnn_backward),
        ):
            with warnings.catch_warnings():  # torch tells of an override, which this is
                warnings.simplefilter("ignore", UserWarning)
                self._library.impl(name, function, dispatch_key)

    def remove(self) -> None:
        """Gives torch its kernels back; a second call does nothing."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor | None,
    unused: torch.Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """``(batch, seqlen, heads, head_dim)``, or ``(total, heads, head_dim)`` with cum_seq_q."""
    refuse({"dropout_p": dropout_p}, {"dropout_p": 0.0})
    tensors = grad_out, query, key, value, out, logsumexp
    rules = {"softmax_scale": scale, "causal": is_causal}
    rules |= window(window_size_left, window_size_right)
    if cum_seq_q is None:  # torch's undefined tensor
        return torch.ops.dash.attention_bwd(*tensors, **rules)
    return torch.ops.dash.attention_varlen_bwd(*tensors, cum_seq_q, cum_seq_k, **rules)


def _sdpa_flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    *,
    scale: float | None = None,
) -> Gradients:
    """``(batch, heads, seqlen, head_dim)``."""
    refuse({"dropout_p": dropout_p}, {"dropout_p": 0.0})
    dense = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    grads = torch.ops.dash.attention_bwd(*dense, logsumexp, softmax_scale=scale, causal=is_causal)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _sdpa_cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Gradients:
    """``(batch, heads, seqlen, head_dim)``; the causal mask of cuDNN is aligned top-left."""
    given = {"attn_bias": attn_bias}
    if is_causal and query.shape[2] != key.shape[2]:
        given["cuDNN's causal mask over unequal lengths"] = (query.shape[2], key.shape[2])
    refuse(given, {})
    return _sdpa_flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, philox_seed, philox_offset, scale=scale,
    )  # fmt: skip
