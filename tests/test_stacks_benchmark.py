"""benchmarks/stacks.py: its routes are one attention; on a GPU it finishes and has an opinion."""

from __future__ import annotations

import sys

import pytest
import torch
from op_calls import randn

pytest.importorskip(
    "torch.nn.attention._registry", reason="torch is older than 2.10: it has no such registry"
)

from benchmarks import stacks


def test_the_routes_give_the_same_bits() -> None:
    q, k, v = (randn(1, 70, heads, 64, seed=heads + i) for i, heads in enumerate((4, 2, 2)))
    outs = {name: route.call(q, k, v) for name, route in routes().items()}
    for name in ("transformers", "flash_attn_3"):
        assert torch.equal(outs[name], outs["operator"])


def routes() -> dict:
    """Those that need no GPU."""
    return {
        name: route
        for name, route in stacks.attentions().items()
        if "flash" not in stacks.BESIDE.get(name, name) or name == "flash_attn_3"
    }


@pytest.mark.parametrize("slow", [False, True])
def test_a_route_that_is_slow_ends_with_an_error(slow, monkeypatch, capsys) -> None:
    times = {name: [1.0, 1.0, 1.0] for name in stacks.attentions()}
    times |= {"registry": [1.03, 9.0, 1.03]} if slow else {"registry": [1.01, 9.0, 1.01]}
    monkeypatch.setattr(stacks, "timed", lambda *_: times)
    monkeypatch.setattr(stacks, "block_step", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["stacks"])
    with pytest.raises(SystemExit) as ended:
        stacks.main()
    assert ended.value.code == ("over 2%: registry" if slow else 0)
    assert f"registry             {times['registry'][0]:.3f} ms" in capsys.readouterr().out


@pytest.mark.gpu
def test_every_route_runs_on_the_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(stacks, "ALLOWED", 10.0)
    words = ["stacks", "--seqlen", "512", "--seconds", "0.02", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        stacks.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("ms a block") == 5
