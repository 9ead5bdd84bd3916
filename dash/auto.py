"""What ``strategy="auto"`` chooses: an order for each problem, by rules, never by a timing.

The rules see one sequence and the device model, so a gradient does not depend on its neighbours in
the batch. They come from timings of the kernel on an H200, TFLOPS, head_dim 128; figures of one row
are of one run, unmarked rows of benchmarks/results/h200_9f6b3b7.csv:

================================  =====  =========  ======  =========  ==========  =========
problem                           shift  symmetric  zigzag  staggered  serpentine  ascending
================================  =====  =========  ======  =========  ==========  =========
full, 512                           385                           333
full, 8k                            562                           557
full, 32k (3cea61a)                 565                           570                    591
full, 32 over 8, 2k (2e67e29)       461                           561
causal, 4k (6178c30)                           527     524        502         468
causal, 8k (6178c30)                           567     567        540         519
causal, 2k, head_dim 64 (6178c30)              414     404        348         272
causal, 4k, head_dim 64 (6178c30)              454     459        441         389
causal, 32 over 8, 8k (b6a0b36)                                   548         535
causal, 28 over 4, 8k                          393     392        512         534
causal, 64 over 8, 4k (b6a0b36)                                   478         507
================================  =====  =========  ======  =========  ==========  =========
"""

from __future__ import annotations

import math

from dash.extension import extension
from dash.support import strategy_reason

# How many steps apart the chains of a shift group may come to a q tile. Four steps of 132 CTAs,
# with 64 KB each of Q, dO and sums, are 34 MB, and an H200's L2 of 50 MB was seen to hold them
# (full mask, 16k, head_dim 128: 576 TFLOPS against staggered's 559).
_SHIFT_MAX_STEPS_APART = 4

# By how many steps the chains of neighbouring KV tiles may differ before staggered's drift costs
# more than serpentine's blocks: at 8 both are even, at 14 and 16 serpentine is 0 to 8% ahead.
# Where other kernels hold SMs meanwhile it is 7 to 16% behind, which no rule can know.
_STAGGERED_MAX_STEPS = 8

# KV tiles of one head up to which symmetric_shift is ahead of zigzag, by the q tiles of a KV tile.
# Two (head_dim 128): 0 to 3% from 4 to 32 tiles. One (64): 2 to 5% from 4 to 16 tiles, behind from
# 32 on. Beyond, where they are about even, zigzag has two advantages: its launch is not cooperative
# and waits for no SM that another kernel holds, and its tickets are half as long and of unequal
# length, so that few heads leave no round of the grid half empty.
_SYMMETRIC_MAX_KV_TILES = {1: 16, 2: 32}

# Whole rounds of symmetric_shift's tickets over the rounds that their number would fill. Simulated
# with 10 heads at 4k, 1.24 in a batch of two: 16% behind zigzag; with 12 and 16 heads, 1.03: even.
_SYMMETRIC_MAX_ROUNDS = 1.05

# Tokens that a call is taken to hold, where a rule asks whether chains or tickets fill the chip.
# Groups are split where these have too few chains. Parts cost an fp32 write and read of dK and dV
# each, 5% of a call at 8k and 20% at 1k; too few chains, a multiple of it.
_TOKENS_AT_ONCE = 8192


def choose_group_split(problem: object) -> int:
    """Into how many parts to cut the q heads of a KV head: 1 unless KV heads are few.

    The fewest parts that give a batch of 8,192 tokens a chain for each SM, with the causal mask
    two, because its chains are of unequal length. So KV heads are split from three down (causal) or
    where there is one (full), up to 8k; later where a sequence is longer.

    Args:
        problem: of one sequence, with whole groups.
    """
    chip = extension().TICKETS_IN_FLIGHT
    wanted = 2 * chip if problem.causal else chip
    chains = problem.chains * _sequences_at_once(problem)
    divisors = (parts for parts in range(1, problem.group + 1) if problem.group % parts == 0)
    return next((parts for parts in divisors if chains * parts >= wanted), problem.group)


def choose_strategy(problem: object, resident_ctas: int) -> tuple[str, str]:
    """The strategy, by the mask, and by how many q heads share a chain.

    - full mask: shift, or staggered where too few CTAs are resident for shift or where shift would
      come back to a q tile when L2 has lost it: many q heads to a KV head, or rows beyond 16k. One
      q head a chain and rows beyond 16k: ascending, if a head fills the chip;
    - causal mask, one q head a chain: zigzag, which keeps every SM busy to the end, or
      symmetric_shift up to 32 KV tiles of two q tiles or 16 of one, if the heads of 8,192 tokens
      leave at most a twentieth of its rounds of CTAs empty;
    - causal mask, more of them: staggered, or serpentine where neighbouring chains differ by more
      than 8 steps, if its blocks fill the chip: at least 128 resident CTAs, and 128 a multiple of
      the block.

    Args:
        problem: of one sequence, groups split as they will be.
        resident_ctas: of the device model.

    Returns:
        The name and one sentence that says why.
    """
    if problem.causal:
        return _for_causal_mask(problem, resident_ctas)
    refusal = strategy_reason("shift", problem, resident_ctas)
    if refusal is not None:
        return "staggered", f"auto: the full mask, and {refusal}"
    apart = steps_apart_in_shift(problem)
    if apart > _SHIFT_MAX_STEPS_APART:
        one_at_a_time = problem.group == 1 and problem.kv_tiles >= extension().TICKETS_IN_FLIGHT
        return "ascending" if one_at_a_time else "staggered", (
            f"auto: the full mask, and shift would come back to a q tile after {apart:.0f} steps, "
            "when L2 has lost it"
        )
    return "shift", "auto: the full mask"


def _for_causal_mask(problem: object, resident_ctas: int) -> tuple[str, str]:
    whose = "chain" if problem.group_split > 1 else "KV head"
    if problem.group == 1:
        why = f"auto: the causal mask, a {whose} for each q head"
        few = 1 < problem.kv_tiles <= _SYMMETRIC_MAX_KV_TILES[problem.tile_kv // problem.tile_q]
        if (
            few
            and strategy_reason("symmetric_shift", problem, resident_ctas) is None
            and _symmetric_rounds(problem, resident_ctas) <= _SYMMETRIC_MAX_ROUNDS
        ):
            return "symmetric_shift", f"{why}, {problem.kv_tiles} KV tiles a head"
        return "zigzag", why
    why = f"auto: the causal mask, {problem.group} q heads to a {whose}"
    steps = problem.group * problem.tile_kv // problem.tile_q
    chip = extension().TICKETS_IN_FLIGHT
    fills = resident_ctas >= chip and chip % extension().serpentine_block(problem) == 0
    if steps > _STAGGERED_MAX_STEPS and fills:
        return "serpentine", f"{why}, so that chains differ by {steps} steps"
    return "staggered", why


def _symmetric_rounds(problem: object, resident_ctas: int) -> float:
    """Rounds that symmetric_shift's tickets take of the CTAs, over those they would fill."""
    tickets = extension().num_tickets("symmetric_shift", problem) * _sequences_at_once(problem)
    rounds = tickets / resident_ctas
    return math.ceil(rounds) / rounds


def _sequences_at_once(problem: object) -> float:
    return max(1.0, _TOKENS_AT_ONCE / problem.seqlen_k)


def steps_apart_in_shift(problem: object) -> float:
    """Steps between two chains of one of shift's groups at the same q tile, on average."""
    chains = extension().resident_ctas_needed("shift", problem)
    return problem.q_tiles / chains * problem.group
