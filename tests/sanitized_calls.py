"""A call of every strategy on small problems: the target of compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitized_calls.py
"""

from __future__ import annotations

import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own block, with its own bounds

import torch
from inputs import Shape, gradients, random_inputs, with_strategies

PROBLEMS = [
    Shape(1, 2, 1, seqlen_q, seqlen_k, head_dim, causal, dtype)
    for (seqlen_q, seqlen_k), (head_dim, dtype), causal in itertools.product(
        ((256, 256), (1, 1), (130, 300), (300, 130)),
        ((64, torch.bfloat16), (72, torch.float16), (128, torch.bfloat16)),
        (False, True),
    )
]

if __name__ == "__main__":
    calls = [parameter.values for parameter in with_strategies(PROBLEMS)]
    for shape, strategy in calls:
        gradients(random_inputs(shape), strategy)
        torch.cuda.synchronize()
    print(f"{len(calls)} calls returned")
