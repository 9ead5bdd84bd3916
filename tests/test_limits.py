"""Arguments are checked before they are used, and long plans are cheap: CASES 21, 22, 26."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tracemalloc

import pytest
from op_calls import BFLOAT16, qkv

import dash
from dash.extension import extension

SHAPE = (2, 1024, 8, 128)

# ---- 21: sizes are limited before they are multiplied --------------------------------------------

HUGE = (2**20, 2**30, 2**31 - 1, 2**31, 2**40, 2**70)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("argument", ["batch", "heads", "group", "seqlen_q", "seqlen_k", "all"])
@pytest.mark.parametrize("causal", [False, True])
def test_huge_sizes_give_a_plan_or_an_error(argument, size, causal) -> None:
    sizes = dict.fromkeys(("batch", "heads", "group", "seqlen_q", "seqlen_k"), 1)
    sizes = dict.fromkeys(sizes, size) if argument == "all" else sizes | {argument: size}
    q_shape = (sizes["batch"], sizes["seqlen_q"], sizes["heads"] * sizes["group"], 128)
    kv_shape = (sizes["batch"], sizes["seqlen_k"], sizes["heads"], 128)
    for strategy in ("auto", *extension().strategies()):
        try:
            p = dash.plan(
                q_shape, kv_shape, BFLOAT16, causal=causal, strategy=strategy, device="cpu"
            )
        except dash.UnsupportedError:
            continue
        assert 0 < p.grid <= 132
        assert p.grid <= p.tickets <= 2**30
        assert p.workspace_bytes >= p.q_shape[1] * p.q_shape[2] * 4
        problem = p.problem.in_tiles(p.group_split)
        for ticket in (0, p.tickets // 2, p.tickets - 1):
            chains = extension().chains(p.strategy, problem, ticket)
            for batch, kv_slice, kv_tile in chains:
                assert 0 <= batch < p.q_shape[0]
                assert 0 <= kv_slice < problem.kv_slices
                assert 0 <= kv_tile < problem.kv_tiles


def test_the_case_that_ended_python() -> None:
    p = dash.plan((1, 1, 2, 8), (1, 2**30, 2, 8), BFLOAT16, causal=True, device="cpu")
    assert len(p.fingerprint) == 16
    endless = (1, 2**26, 1, 64)
    text = str(dash.plan(endless, endless, BFLOAT16, causal=False, device="cpu"))
    assert re.search(r"^fingerprint +none: the order has", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [("verify", "--seqlen", "seqlen_q"), ("schedule", "--kv-tiles", "seqlen_q")],
)
def test_the_command_line_refuses_without_a_trace(command, option, name) -> None:
    words = [sys.executable, "-m", "dash", command, option, str(2**31)]
    said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    assert name in said.stderr


# ---- 22: the fingerprint of long sequences -------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_text_of_a_long_plan_is_cheap(causal) -> None:
    shape = (1, 131072, 8, 128)
    tracemalloc.start()
    start = time.process_time()
    text = str(dash.plan(shape, shape, BFLOAT16, causal=causal, device="cpu"))
    took = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "fingerprint" in text
    assert took < 2, "a quarter of the heads of CASES 22, which take 2 s"
    assert peak < 20e6


def test_plan_does_not_initialise_cuda() -> None:
    program = (
        "import torch, dash; s = (1, 256, 2, 64); torch.cuda.is_available = None; "
        "torch.cuda._lazy_init = None; str(dash.plan(s, s, torch.bfloat16, causal=True))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


# ---- 26: checks before use -----------------------------------------------------------------------

WRONG = {
    "head_dim 0": lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]),
    "no dimensions": lambda q, k, v: (q[0, 0, 0, 0], k, v),
    "a list": lambda q, k, v: (q.tolist(), k, v),
    "None": lambda q, k, v: (q, None, v),
    "no batch dimension": lambda q, k, v: (q[0], k[0], v[0]),
    "no heads": lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]),
    "float64": lambda q, k, v: (q.double(), k.double(), v.double()),
}


@pytest.mark.parametrize("what", WRONG)
def test_attention_checks_arguments_before_it_uses_them(what) -> None:
    with pytest.raises(dash.UnsupportedError, match=r"required: "):
        dash.attention(*WRONG[what](*qkv()))


@pytest.mark.parametrize(
    "more",
    [
        {"softmax_scale": "large"},
        {"window_left": -1},
        {"window_right": -2},
        {"group_split": -1},
        {"group_split": 3},
        {"strategy": ""},
        {"forward": "fastest"},
        {"forward": "flash"},
        {"softmax_scale": float("nan")},
    ],
)
def test_attention_refuses_options_by_name(more) -> None:
    with pytest.raises(dash.UnsupportedError, match=f"{next(iter(more))} is .*required: "):
        dash.attention(*qkv(), **more)


@pytest.mark.parametrize(
    "more",
    [
        {"q_shape": (2, 64.5, 8, 128)},
        {"q_shape": (2, "64", 8, 128)},
        {"q_shape": ()},
        {"dtype": "bfloat16"},
        {"group_split": 1.5},
        {"window_left": 0.5},
        {"window_right": -1},
        {"strategy": None},
    ],
)
def test_plan_refuses_by_name(more) -> None:
    arguments = {"q_shape": SHAPE, "kv_shape": SHAPE, "dtype": BFLOAT16, "causal": True} | more
    with pytest.raises(dash.UnsupportedError, match=f"{next(iter(more))} is .*; required: "):
        dash.plan(**arguments, device="cpu")
