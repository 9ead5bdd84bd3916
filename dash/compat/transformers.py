"""Hugging Face transformers: ``attn_implementation="dash"``.

    import dash.compat.transformers
    dash.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dash", dtype="bfloat16")

Two functions are registered: ``attention`` and, because without one a padded batch would arrive
with no mask and no warning, ``mask``. Packed sequences (``cu_seq_lens_q``, or ``position_ids``
that restart) and padded batches run as packed calls; nothing in a layer waits for the device.
What dash cannot honour raises ``dash.UnsupportedError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import dash
from dash.compat.arguments import refuse, sink, window
from dash.compat.packing import Packing, document_starts, packing_of_positions, unpadding
from dash.support import UnsupportedError

NAME = "dash"

# The masks of transformers.masking_utils that dash computes itself from is_causal, sliding_window
# and the sequences' bounds, and those that join them.
_KNOWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "padding_mask_function",
    "and_masks",
}


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation=name`` run dash, in this process.

    Raises:
        ImportError: transformers is older than its attention and mask interfaces (4.53).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """One attention layer, as transformers' models call it.

    Args:
        module: the layer; its ``is_causal`` holds where the argument is None.
        query: ``(batch, heads, seqlen_q, head_dim)``.
        key, value: ``(batch, kv_heads, seqlen_k, head_dim)``.
        attention_mask: what ``mask`` returned.
        dropout, softcap: must ask for nothing.
        scaling: factor on the scores; None is ``head_dim ** -0.5``.
        sliding_window: tokens that a query sees to either side, itself included.
        s_aux: ``(heads,)``, a sink for each head.
        more: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of packed sequences with ``max_length_q`` and
            ``max_length_k``; ``position_ids``. Others are not attention's.

    Returns:
        ``(batch, seqlen_q, heads, head_dim)``, zeros in padding, and None for the weights.
    """
    refuse(
        {"dropout": dropout, "softcap": softcap}
        | {
            "output_attentions": more.get("output_attentions"),
            "block_table": more.get("block_table"),
        },
        {"dropout": 0.0, "softcap": None, "output_attentions": False},
    )
    query, key, value = (t.transpose(1, 2) for t in _of_one_dtype(query, key, value))
    reach = -1 if sliding_window is None else int(sliding_window) - 1
    rules = {
        "causal": module.is_causal if is_causal is None else bool(is_causal),
        "softmax_scale": scaling,
        **window(reach, reach),
        **sink(s_aux),
    }
    packing = _packing(query, key, attention_mask, more)
    if packing is None:
        return dash.attention(query, key, value, **rules), None
    return packing.attention(query, key, value, **rules), None


@torch.compiler.disable  # it reads the device, and closures of transformers
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    **more: object,
) -> torch.Tensor | None:
    """What ``attention`` gets as ``attention_mask``; called once a forward pass.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: of this call.
        mask_function: transformers' rule; one that dash does not know raises.
        attention_mask: ``(batch, kv_length)`` bool, False in padding, or None.

    Returns:
        None where every token counts; the padding mask; or, for packed sequences, their int32
        ``cu_seqlens``. Reads the device, as transformers' own mask functions do here, except in a
        graph capture. Breaks a graph of ``torch.compile`` once a forward pass.
    """
    documents = None
    for name, function in _parts(mask_function):
        if name not in _KNOWN_MASKS:
            raise UnsupportedError(
                [f"the model's mask has the part {name}; required: causal, bidirectional and "
                 "sliding window masks, with padding or packed sequences"]
            )  # fmt: skip
        if name == "packed_sequence_mask_function":
            documents = _captured(function, "packed_sequence_mask")
    if attention_mask is None:
        return None if documents is None else document_starts(documents)
    attention_mask = attention_mask[:, -kv_length:]
    whole = attention_mask.shape[1] == kv_length
    return None if whole and not _is_capturing() and attention_mask.all() else attention_mask


def _packing(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, more: dict
) -> Packing | None:
    """How the tokens form sequences, or None where each row of the batch is one."""
    cu_seqlens = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    given = [c for c in cu_seqlens if c is not None]
    if given:
        if attention_mask is not None and attention_mask.dim() != 1:  # 1: what mask read from ids
            refuse({"attention_mask beside cu_seq_lens_q": attention_mask}, {})
        bounds = more.get("max_length_q"), more.get("max_length_k")
        return Packing(*(given if len(given) == 2 else given * 2), *bounds)
    if attention_mask is None:
        return packing_of_positions(more.get("position_ids"), query, key)
    if attention_mask.dim() == 1:
        return Packing(attention_mask, attention_mask)
    if attention_mask.dim() == 2:
        return unpadding(attention_mask, query.shape[1], key.shape[1])
    raise UnsupportedError(
        [f"attention_mask has shape {tuple(attention_mask.shape)}; required: (batch, seqlen), a "
         "padding mask, or None"]
    )  # fmt: skip


def _of_one_dtype(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Under autocast in its dtype; else in that of ``value``, which norms and rotations spare."""
    device = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else tensors[-1].dtype
    return (t.to(dtype) for t in tensors)


def _parts(function: Callable | None) -> Iterator[tuple[str, Callable]]:
    """(name, function) of a mask function of transformers and of all that it joins."""
    if function is None:
        return
    yield getattr(function, "__qualname__", repr(function)).split(".<locals>")[0], function
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part) and not isinstance(part, torch.Tensor):
                yield from _parts(part)


def _captured(function: Callable, name: str) -> object:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
