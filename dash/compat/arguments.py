"""Arguments that several stacks pass alike: windows, and what dash has no kernel for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dash.support import UnsupportedError


def window(left: int | None, right: int | None) -> dict[str, int]:
    """FlashAttention's window, where -1 (any negative) is unlimited, as dash's arguments."""
    sides = {"window_left": left, "window_right": right}
    return {name: int(side) for name, side in sides.items() if side is not None and side >= 0}


def sink(logits: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """One logit a head as dash's argument; nothing where there is none."""
    return {} if logits is None else {"sink": logits}


def refuse(given: Mapping[str, object], neutral: Mapping[str, object]) -> None:
    """Raises ``UnsupportedError`` with a sentence for each argument that is not neutral.

    Args:
        given: arguments by name.
        neutral: the value of each under which it asks for nothing. None always asks for nothing.
    """
    reasons = [
        f"{name} is {_shown(value)}; required: {neutral.get(name)}"
        for name, value in given.items()
        if value is not None and value is not neutral.get(name) and not _equal(value, neutral, name)
    ]
    if reasons:
        raise UnsupportedError(reasons)


def _equal(value: object, neutral: Mapping[str, object], name: str) -> bool:
    # A tensor is never neutral, and comparing one with a number would read the device.
    return isinstance(value, (bool, int, float, str)) and value == neutral.get(name)


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
