"""The name of an order: a hash of every visit and turn that the schedule of one sequence decides.

Up to ``MAX_VISITS`` each (q_tile, turn) is hashed as it lies in the schedule. Beyond, where that
would be tens of gigabytes, the same order is hashed as runs of even steps.
"""

from __future__ import annotations

import functools
import hashlib

from dash.device import dtype_name
from dash.extension import extension
from dash.problem import Problem
from dash.support import UnsupportedError

# Part of every fingerprint. Raise it when a kernel change alters bits under an unchanged schedule:
# another order of products inside a step, another rounding, another exp.
ORDER_VERSION = 2

MAX_VISITS = 2**30  # 16 bytes each, 17 GB: about ten seconds
MAX_READ_VISITS = 2**35  # in runs: the schedule is still asked for each, about a minute

_DIGITS = 16
_BLOCK_BYTES = 1 << 20


@functools.lru_cache(maxsize=256)
def fingerprint(strategy: str, group_split: int, problem: Problem) -> str:
    """16 hex digits of the problem of one sequence, then its chains by (KV head, KV tile).

    Args:
        strategy, group_split: what runs, not what was asked for.
        problem: of one sequence; its own strategy, group_split and device do not count.

    Raises:
        UnsupportedError: the order is so long that nobody would wait for it.
    """
    in_tiles = problem.in_tiles(group_split)
    qk, v = extension().head_dim_bucket(*problem.head_dims)
    header = (
        f"dash order {ORDER_VERSION} {strategy} {dtype_name(problem.dtype)} "
        f"causal={in_tiles.causal} q={problem.q_shape} kv={problem.kv_shape} bucket={qk} "
        f"tiles={in_tiles.tile_q}x{in_tiles.tile_kv}"
    )
    if problem.head_dim_v is not None:
        header += f" head_dim_v={problem.head_dim_v} bucket_v={v}"
    if in_tiles.windowed:
        header += f" window={in_tiles.window_left},{in_tiles.window_right}"
    if group_split > 1:
        header += f" group split in {group_split}"
    as_runs = _as_runs(strategy, in_tiles)
    if as_runs:
        header += " in runs"
    digest = hashlib.sha256(header.encode())
    reader = extension().OrderReader(strategy, in_tiles, as_runs)
    block = bytearray(_BLOCK_BYTES)
    while size := reader.read(block):
        digest.update(memoryview(block)[:size])
    return digest.hexdigest()[:_DIGITS]


def _as_runs(strategy: str, in_tiles: object) -> bool:
    most = in_tiles.q_tiles * in_tiles.kv_tiles * in_tiles.kv_slices  # of a full mask
    if most <= MAX_VISITS:
        return False
    visits = extension().OrderReader(strategy, in_tiles, True).visits
    if visits > MAX_READ_VISITS:
        raise UnsupportedError(
            [f"the order has {visits:,} visits; required for a fingerprint: {MAX_READ_VISITS:,}"]
        )
    return visits > MAX_VISITS
