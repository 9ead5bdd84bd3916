// A dQ writer: one thread that carries staged dQ tiles to global memory in turn order.
//
// kDqWriters of them alternate over the CTA's steps, because one hand-off (poll 430, copy 1,600,
// release 1,230 cycles for 32 KB: PERFORMANCE.md §2) takes as long as a step of matrix products.
#pragma once

#include "../sm90/bulk_reduce.cuh"
#include "../sm90/turn_lock.cuh"
#include "shared_storage.h"

namespace dash {

template <typename Element, typename Config>
__device__ void write_dq(SharedStorage<Element, Config>& smem, MainParams const& params,
                         int writer) {
  constexpr int kBytes = Config::kDqTileFloats * sizeof(float);
  Ring<Config::kStages> ring(writer);
  for (uint32_t parity = 0;; parity ^= 1) {
    int const stage = ring.stage();
    mbarrier_wait(smem.q_full[stage], ring.parity(), "q_full (dq writer)");
    StepDescriptor const step = smem.steps[stage];
    mbarrier_arrive(smem.q_empty[stage]);
    ring.advance(Config::kDqWriters);
    if (step.flags & kEndOfWork) break;

    int* const turn_counter = params.dq_turns + step.dq_tile;
    float* const tile = params.dq_accum + int64_t{step.dq_tile} * Config::kDqTileFloats;
    if (step.turn > 0) wait_turn(turn_counter, step.turn);
    mbarrier_wait(smem.dq_full[writer], parity, "dq_full");
    // The first writer stores, so that nobody has to clear the sums before.
    if (step.turn == 0)
      bulk_store(tile, smem.dq, kBytes);
    else
      bulk_reduce_add(tile, smem.dq, kBytes);
    bulk_commit();
    bulk_wait_source_read();
    mbarrier_arrive(smem.dq_empty[writer]);
    bulk_wait_complete();
    pass_turn(turn_counter, step.turn + 1);
  }
}

}  // namespace dash
