"""What is remembered by signature is bounded, and what the packed binding is given is checked."""

from __future__ import annotations

import pytest

from dash import _C
from dash.remembered import Remembered


def test_a_full_one_begins_anew() -> None:
    known: Remembered[int, str] = Remembered(2)
    known[1] = "a"
    known[2] = "b"
    known[2] = "c"  # known already: nothing is forgotten
    assert known == {1: "a", 2: "c"}
    known[3] = "d"
    assert known == {3: "d"}


@pytest.mark.parametrize("name", ["window_left", "window_right"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_packed_binding_refuses_a_negative_window(name, causal) -> None:
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "total_q": 8, "total_k": 8, "head_dim": 64}
    with pytest.raises(ValueError, match=rf"{name} must be -1 \(unlimited\) or more, got -2"):
        _C.varlen_workspace_bytes(**shape, causal=causal, **{name: -2})
