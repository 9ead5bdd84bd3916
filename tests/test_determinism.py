"""The same bits on every call: CASES.md 5, 9 to 11 and 15, for every strategy that may run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_conditions import DifferentCalls, OtherStream, all_inside, poison_allocator
from gradient_digests import digests
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import (
    CASE_5_LENGTHS,
    ON_GPU,
    Inputs,
    Shape,
    gradients,
    needs_gpu,
    random_inputs,
    same_bits,
    skip_if_refused,
    with_strategies,
)

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
MASKS = (False, True)
REPEATS = 1000 if ON_GPU else 3


def case_5(head_dim: int, dtype: torch.dtype) -> list[Shape]:
    return [
        Shape(1, 6, kv_heads, seqlen_q, seqlen_k, head_dim, causal, dtype)
        for (seqlen_q, seqlen_k), kv_heads, causal in itertools.product(
            CASE_5_LENGTHS, (6, 2, 1), MASKS
        )
    ]


# Several sequences and heads, more chains than one round of CTAs, ragged ends.
SHAPES = [
    Shape(3, 6, 2, seqlen_q, seqlen_k, head_dim, causal)
    for (seqlen_q, seqlen_k), head_dim, causal in itertools.product(
        ((1000, 1000), (700, 1300)), (64, 128), MASKS
    )
]


def assert_repeats(shape: Shape, strategy: str, repeats: int, load: OtherStream | None) -> None:
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    different = DifferentCalls(gradients(inputs, strategy))
    for _ in range(repeats):
        if load is not None:
            load.enqueue()
        different.add(gradients(inputs, strategy))
    assert different.count() == 0, f"{different.count()} tensors of {repeats} calls differ"


# --- 5: 1,000 repeats ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(case_5(128, BF16)))
def test_case_5_repeats(shape: Shape, strategy: str) -> None:
    assert_repeats(shape, strategy, REPEATS, load=None)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(case_5(64, FP16)))
def test_case_5_repeats_at_head_dim_64(shape: Shape, strategy: str) -> None:
    assert_repeats(shape, strategy, REPEATS, load=None)


# --- 15: the GPU is busy with something else, and another process -------------------------------


@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_case_15_repeats_beside_a_busy_stream(shape: Shape, strategy: str) -> None:
    assert_repeats(shape, strategy, 200, load=OtherStream())


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(case_5(128, BF16)))
def test_case_15_list_of_case_5_beside_a_busy_stream(shape: Shape, strategy: str) -> None:
    assert_repeats(shape, strategy, REPEATS, load=OtherStream())


@needs_gpu
def test_case_15_other_processes() -> None:
    """Two more processes, running at the same time as this one, find the same bits."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(tests / "gradient_digests.py")]
    environment = {**os.environ, "PYTHONPATH": path}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    here = digests()
    for process in processes:
        printed, _ = process.communicate(timeout=80)
        assert process.returncode == 0
        assert json.loads(printed) == here
    assert len(set(here.values())) > 1, "equal digests for different problems"


@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES[:4]))
def test_two_calls_at_once_do_not_share_anything(shape: Shape, strategy: str) -> None:
    """Two streams, other values, one shape: counters and workspaces are each call's own."""
    skip_if_refused(shape, strategy)
    pair = [random_inputs(shape, seed) for seed in (1, 2)]
    different = [DifferentCalls(gradients(inputs, strategy)) for inputs in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, inputs, calls in zip(streams, pair, different, strict=True):
            with torch.cuda.stream(stream):
                calls.add(gradients(inputs, strategy))
    torch.cuda.synchronize()
    assert [calls.count() for calls in different] == [0, 0]


# --- 9: memory that held something else ---------------------------------------------------------

MEMORY = [
    Shape(1, heads, kv_heads, 600, 900, head_dim, causal)
    for (heads, kv_heads), head_dim, causal in itertools.product(
        ((64, 8), (16, 2), (8, 1), (4, 4)), (64, 128), MASKS
    )
]


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(MEMORY))
def test_case_9_poisoned_memory(shape: Shape, strategy: str, byte: int) -> None:
    """Outputs, sums, delta and turn counters start as ``byte``; 0xFF makes every output NaN."""
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    wanted = gradients(inputs, strategy)
    ranges = poison_allocator(byte)
    got = gradients(inputs, strategy)
    assert not ON_GPU or all_inside(got, ranges), "the outputs' memory was not poisoned"
    assert not any(t.isnan().any() for t in got)
    assert same_bits(got, wanted)


# --- 10: streams --------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_case_10_side_stream(shape: Shape, strategy: str) -> None:
    """A long kernel, then the inputs, dO last, then the op, all on a side stream."""
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    wanted = gradients(inputs, strategy)
    late = Inputs(*(torch.full_like(t, torch.nan) for t in inputs.tensors()), causal=shape.causal)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        for target, source in reversed(list(zip(late.tensors(), inputs.tensors(), strict=True))):
            target.copy_(source)
        got = gradients(late, strategy)
    stream.synchronize()
    assert same_bits(got, wanted)


# --- 11: CUDA graphs ----------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_case_11_graph_replays(shape: Shape, strategy: str) -> None:
    """12 replays with changed inputs and cleared outputs, and one with the same inputs again."""
    skip_if_refused(shape, strategy)
    variants = [random_inputs(shape, seed) for seed in range(12)]
    wanted = [gradients(inputs, strategy) for inputs in variants]
    static = Inputs(*(t.clone() for t in variants[0].tensors()), causal=shape.causal)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(static, strategy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(static, strategy)
    for seed in (*range(12), 11):
        for target, source in zip(static.tensors(), variants[seed].tensors(), strict=True):
            target.copy_(source)
        for tensor in got:
            tensor.fill_(torch.nan)
        graph.replay()
        assert same_bits(got, wanted[seed]), f"replay {seed}"


# --- batch invariance ---------------------------------------------------------------------------

BATCHES = [
    Shape(5, heads, kv_heads, seqlen_q, seqlen_k, head_dim, causal)
    for (heads, kv_heads), (seqlen_q, seqlen_k), head_dim, causal in itertools.product(
        ((6, 2), (3, 3)), ((512, 512), (300, 420), (1100, 700)), (64, 128), MASKS
    )
]


WITH_AUTO = [pytest.param(shape, "auto", id=f"{shape}-auto") for shape in BATCHES]


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(BATCHES) + WITH_AUTO)
def test_a_sequence_alone_and_at_each_place_of_a_batch(shape: Shape, strategy: str) -> None:
    if strategy != "auto":
        skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    alone = [gradients(inputs.sequences(i), strategy) for i in range(shape.batch)]
    for shift in range(shape.batch):
        order = [(place + shift) % shape.batch for place in range(shape.batch)]
        moved = Inputs(*(t[order] for t in inputs.tensors()), causal=shape.causal)
        together = gradients(moved, strategy)
        for place, sequence in enumerate(order):
            got = [t[place : place + 1] for t in together]
            assert same_bits(got, alone[sequence]), f"sequence {sequence} at place {place}"
