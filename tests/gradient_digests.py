"""Digests of the gradients of a few problems, for a comparison across processes.

python tests/gradient_digests.py        prints one JSON object: problem and strategy → sha256
"""

from __future__ import annotations

import hashlib
import itertools
import json

from inputs import Shape, bits, gradients, random_inputs, with_strategies

PROBLEMS = [
    Shape(2, 6, 2, seqlen_q, seqlen_k, head_dim, causal)
    for (seqlen_q, seqlen_k), head_dim, causal in itertools.product(
        ((1024, 1024), (799, 1003)), (64, 128), (False, True)
    )
]


def digests() -> dict[str, str]:
    found = {}
    for shape, strategy in (parameter.values for parameter in with_strategies(PROBLEMS)):
        digest = hashlib.sha256()
        for tensor in gradients(random_inputs(shape), strategy):
            digest.update(bits(tensor).cpu().numpy().tobytes())
        found[f"{shape} {strategy}"] = digest.hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps(digests()))
