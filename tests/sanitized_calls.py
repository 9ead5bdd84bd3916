"""A call of every strategy on small problems: the target of compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitized_calls.py
"""

from __future__ import annotations

import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own block, with its own bounds

import torch
from inputs import Shape, gradients, random_inputs, strategies_for
from pack_cases import pack_on_device, strategies_of
from packs import PackShape

PROBLEMS = [
    Shape(1, 2, 1, seqlen_q, seqlen_k, head_dim, causal, dtype)
    for (seqlen_q, seqlen_k), (head_dim, dtype), causal in itertools.product(
        ((256, 256), (1, 1), (130, 300), (300, 130)),
        ((64, torch.bfloat16), (72, torch.float16), (128, torch.bfloat16)),
        (False, True),
    )
]

PROBLEMS += [
    Shape(1, 2, 1, seqlen_q, seqlen_k, 192, causal, head_dim_v=of_v)
    for (seqlen_q, seqlen_k), of_v, causal in itertools.product(
        ((256, 256), (1, 1), (130, 300), (300, 130)), (72, 128), (False, True)
    )
]

SPLIT = [Shape(2, 4, 1, 200, 300, head_dim, causal) for head_dim in (72, 128) for causal in (0, 1)]
SPLIT.append(Shape(2, 4, 1, 200, 300, 136, True, head_dim_v=128))

# Empty sequences, one row, tails of tiles, rows of no sequence.
PACKS = [
    PackShape(lengths, 4, 2, head_dim, causal, gaps=gaps, tails=tails)
    for lengths, (gaps, tails), (head_dim, causal) in itertools.product(
        (
            ((1, 1), (0, 0), (130, 130), (1, 1)),
            ((0, 5), (70, 300), (3, 0), (300, 70)),
            ((1, 1),),
        ),
        (((0, 0), (0, 0)), ((3, 2), (70, 1))),
        ((64, False), (72, True), (128, False), (128, True)),
    )
]

PACKS.append(
    PackShape(((0, 5), (70, 300), (300, 70)), 4, 2, 192, True, tails=(9, 1), head_dim_v=128)
)

# What describes no pack: as cu_seqlens of q, of k and of both, for three spaces of 200 rows.
GARBAGE = ((0, 300, 100, 600), (5, 100, 200, 2**31 - 1), (-(2**31), 0, 1, 600), (600, 400, 200, 0))


def packed_calls() -> int:
    """Plays them; returns how many."""
    calls = 0
    for shape in PACKS:
        pack = pack_on_device(shape)
        for strategy in strategies_of(shape):
            pack.gradients(strategy, 2)
            calls += 1
        torch.cuda.synchronize()
    for garbage, sides in itertools.product(GARBAGE, ("q", "k", "qk")):
        pack = pack_on_device(PackShape(((200, 200),) * 3, 4, 2, 128, causal=True))
        for side in sides:
            wrong = torch.tensor(garbage, dtype=torch.int32, device="cuda")
            pack.lengths[f"cu_seqlens_{side}"] = wrong
        pack.gradients()
        torch.cuda.synchronize()
        calls += 1
    return calls


if __name__ == "__main__":
    calls = [
        (shape, strategy, parts)
        for shapes, parts in ((PROBLEMS, 1), (SPLIT, 4))
        for shape in shapes
        for strategy in strategies_for(shape)
    ]
    for shape, strategy, parts in calls:
        gradients(random_inputs(shape), strategy, parts)
        torch.cuda.synchronize()
    print(f"{len(calls) + packed_calls()} calls returned")
