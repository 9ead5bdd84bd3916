"""A call of every strategy on small problems: the target of compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitized_calls.py
"""

from __future__ import annotations

import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own block, with its own bounds

import torch
from inputs import Shape, gradients, random_inputs, strategies_for

PROBLEMS = [
    Shape(1, 2, 1, seqlen_q, seqlen_k, head_dim, causal, dtype)
    for (seqlen_q, seqlen_k), (head_dim, dtype), causal in itertools.product(
        ((256, 256), (1, 1), (130, 300), (300, 130)),
        ((64, torch.bfloat16), (72, torch.float16), (128, torch.bfloat16)),
        (False, True),
    )
]

SPLIT = [Shape(2, 4, 1, 200, 300, head_dim, causal) for head_dim in (72, 128) for causal in (0, 1)]

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
    print(f"{len(calls)} calls returned")
