"""FlashAttention-3 and -4 through the functions that their own users call.

``flash_attn_interface`` is FlashAttention-3's package and ``flash_attn.cute`` FlashAttention-4's.
Their autograd nodes are what a training step pays, so the backward is played through autograd. Only
keywords of their first releases are needed; what a release does not know and would only be told for
its convenience (the longest sequence) is left out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

import dash
from dash.bench.inputs import Tensors
from dash.bench.measure import Call
from dash.bench.providers import Unavailable
from dash.bench.shapes import Shape

FA3_MODULE = "flash_attn_interface"
FA4_MODULE = "flash_attn.cute"
DISTRIBUTIONS = {FA3_MODULE: ("flash_attn_3", "flash-attn-3"), FA4_MODULE: ("flash-attn-4",)}
CONVENIENCES = ("max_seqlen_q", "max_seqlen_k")
UNLIMITED = {FA3_MODULE: -1, FA4_MODULE: None}


def find_module(name: str) -> ModuleType:
    """The package, or ``Unavailable`` with why it does not load.

    dash answers to FlashAttention-3's name where somebody asked it to; that is no FlashAttention.
    """
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: built for another torch
        raise Unavailable(f"{name} does not load: {error}") from error
    ours = Path(dash.__file__).parent
    if ours in Path(getattr(module, "__file__", None) or "/").resolve().parents:
        raise Unavailable(f"{name} is dash's own adapter here, not FlashAttention")
    return module


def interface_calls(
    name: str, deterministic: bool
) -> Callable[[Shape, Tensors], tuple[Call, dict[str, str]]]:
    """The backward of ``name``'s ``flash_attn_func`` or ``flash_attn_varlen_func``."""

    def calls(shape: Shape, t: Tensors) -> tuple[Call, dict[str, str]]:
        module = find_module(name)
        leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
        window = tuple(
            UNLIMITED[name] if side is None else side
            for side in (shape.window_left, shape.window_right)
        )
        if shape.windowed and shape.causal:
            window = (window[0], 0)
        options = {
            "softmax_scale": shape.head_dim**-0.5,
            "causal": shape.causal,
            "window_size": window,
            "deterministic": deterministic,
        }
        if shape.packed:
            options |= {"cu_seqlens_q": t.cu_seqlens, "cu_seqlens_k": t.cu_seqlens}
            options |= {"max_seqlen_q": shape.seqlen, "max_seqlen_k": shape.seqlen_k}
            function = module.flash_attn_varlen_func
        else:
            function = module.flash_attn_func
        out = function(*leaves, **known_options(function, options))
        out = out[0] if isinstance(out, tuple) else out  # some releases always return lse, too

        def call() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, leaves, t.dout, retain_graph=True)

        return call, {"version": version_of(name, module)}

    return calls


def known_options(function: Callable, options: dict[str, object]) -> dict[str, object]:
    """The options that this release of the function takes.

    Raises:
        Unavailable: it lacks one that decides what is computed.
    """
    known = inspect.signature(function).parameters
    lost = [n for n in options if n not in known and n not in CONVENIENCES]
    if "deterministic" in lost and not options["deterministic"]:
        lost.remove("deterministic")
    if lost:
        raise Unavailable(f"{function.__name__} of this release does not take {', '.join(lost)}")
    return {name: value for name, value in options.items() if name in known}


def version_of(name: str, module: ModuleType) -> str:
    for distribution in DISTRIBUTIONS[name]:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{name} {getattr(module, '__version__', 'of unknown version')}"
