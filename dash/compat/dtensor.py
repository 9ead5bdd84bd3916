"""DTensor's sharding rules of dash's operators: by sequences and by heads, never inside a sequence.

    import dash.compat.dtensor
    dash.compat.dtensor.register()

Then ``dash.attention`` and ``dash.attention_varlen`` take DTensors. Dense calls may be sharded by
batch and by heads, packed ones by heads, without communication; any other placement is
redistributed to one of these, as DTensor does. Heads are sharded only where the KV heads divide
evenly, because a rank's q heads must belong to its own KV heads. Each rank's part is a problem of
its own: a gradient's bits are those of the local call (``dash.plan`` of the local shapes names it).
"""

from __future__ import annotations

from itertools import combinations
from math import prod

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# An argument's (batch dimension, heads dimension); an argument not named here is replicated.
_DENSE = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), (0, 2))
_DENSE |= {"softmax_lse": (0, 1), "dlse": (0, 1), "sink": (None, 0)}
_PACKED = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), (None, 1))
_PACKED |= {"softmax_lse": (None, 0), "dlse": (None, 0), "sink": (None, 0)}

_OPERATORS = {
    "attention_fwd": _DENSE,
    "attention_bwd": _DENSE,
    "attention_varlen_fwd": _PACKED,
    "attention_varlen_bwd": _PACKED,
    "attention_sink_bwd": _DENSE,
}


def register() -> None:
    """Registers the rules with DTensor, in this process; a second call changes nothing."""
    for name, dimensions in _OPERATORS.items():
        packet = getattr(torch.ops.dash, name)
        for operator in (getattr(packet, overload) for overload in packet.overloads()):
            register_sharding(operator)(_rule(operator, dimensions))


def _rule(operator: torch._ops.OpOverload, dimensions: dict[str, tuple]) -> object:
    schema = operator._schema
    outputs = [output.name for output in schema.returns]
    of_sink = outputs == [""]  # its one output, dsink, sums over the batch

    def rule(*args: object, **more: object) -> list[tuple[list, list]]:
        names = (argument.name for argument in schema.arguments)
        given = dict(zip(names, args, strict=False))
        given |= more

        def sharded(which: int) -> tuple[list, list]:
            def placement(name: str) -> Shard | Replicate:
                dimension = dimensions.get(name, (None, None))[which]
                return Replicate() if dimension is None else Shard(dimension)

            tensors = [placement(n) if hasattr(t, "placements") else None for n, t in given.items()]
            if of_sink:
                return [Partial() if which == 0 else Shard(0)], tensors
            return [placement(name) for name in outputs], tensors

        whole = [Replicate()] * len(outputs)
        replicated = whole, [r and Replicate() for r in sharded(0)[1]]
        choices = [replicated]
        grouped = "sink" if of_sink else "k"  # the argument with the fewest heads
        if dimensions["q"][0] is not None:
            choices.append(sharded(0))
        if _divides(given[grouped], dimensions[grouped][1]):
            choices.append(sharded(1))
        return choices

    return rule


def _divides(spec: object, dimension: int) -> bool:
    """Whether a dimension is cut evenly over whichever dimensions of the mesh it is sharded.

    A rule cannot say over which. DTensor itself leaves out those with more shards than elements.
    """
    elements = spec.shape[dimension]
    sizes = [size for size in spec.mesh.shape if size > 1]
    subsets = (c for count in range(len(sizes)) for c in combinations(sizes, count + 1))
    return all(elements % shards == 0 or elements < shards for shards in map(prod, subsets))
