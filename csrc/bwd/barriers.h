// Every barrier of the main kernel.
//
// | barrier       | establishes                     | arrivals a phase            | waits      | fence, and why                    |
// |---------------|---------------------------------|-----------------------------|------------|-----------------------------------|
// | plan_full[p]  | a planned step can be read      | tile scheduler              | loader     | arrive releases the descriptor    |
// | plan_empty[p] | the planned step was read       | loader                      | scheduler  | none                              |
// | k_full[c]     | K of a chain has landed         | loader + bytes              | MMA        | none: TMA completes on it         |
// | k_empty[c]    | nobody reads K any more         | every MMA warp              | loader     | none: wgmma reads were waited for |
// | v_full        | V of the chain has landed       | loader + bytes              | MMA        | none                              |
// | v_empty       | nobody reads V any more         | every MMA warp              | loader     | none                              |
// | q_full[s]     | Q, lse and the descriptor are in| loader + bytes              | MMA, one dQ writer | arrive releases the descriptor |
// | repair        | a tile with keyless rows landed | loader + bytes              | loader     | proxy fence after the loader zeroed them, before q_full or dout_full |
// | q_empty[s]    | Q and the descriptor were read  | every MMA warp + one writer | loader     | none                              |
// | dout_full[s]  | dO and −delta have landed       | loader + bytes              | MMA        | none                              |
// | dout_empty[s] | dO and −delta were read         | every MMA warp              | loader     | none                              |
// | dq_full[w]    | a dQ tile is staged for writer w| every MMA warp              | writer w   | proxy fence by every MMA thread: bulk adds read what st.shared wrote |
// | dq_empty[w]   | writer w's copy read the stage  | writer w                    | MMA        | bulk_wait_source_read             |
// | ds_full[d]    | dS of both warpgroups is stored | every MMA warp              | MMA        | proxy fence by every MMA thread: wgmma reads what stmatrix wrote |
// | ds_empty      | dQ of a step is done with dS    | every MMA warp              | MMA        | none; only where dS has one slot  |
//
// Writer w plays steps w, w + kDqWriters, …: it has its own dq pair and, because the stages are a
// multiple of the writers, its own stages of q_full. So every waiter sees every phase of its
// barriers.
#pragma once

#include "../sm90/mbarrier.cuh"
#include "config.h"

namespace dash {

template <typename Storage, typename Config>
__device__ void init_barriers(Storage& smem) {
  for (int p = 0; p < Config::kPlannedSteps; ++p) {
    mbarrier_init(smem.plan_full[p], 1);
    mbarrier_init(smem.plan_empty[p], 1);
  }
  for (int c = 0; c < Config::kKSlots; ++c) {
    mbarrier_init(smem.k_full[c], 1);
    mbarrier_init(smem.k_empty[c], Config::kMmaWarps);
  }
  mbarrier_init(smem.v_full, 1);
  mbarrier_init(smem.v_empty, Config::kMmaWarps);
  for (int s = 0; s < Config::kStages; ++s) {
    mbarrier_init(smem.q_full[s], 1);
    mbarrier_init(smem.q_empty[s], Config::kMmaWarps + 1);
    mbarrier_init(smem.dout_full[s], 1);
    mbarrier_init(smem.dout_empty[s], Config::kMmaWarps);
  }
  mbarrier_init(smem.repair, 1);
  for (int d = 0; d < Config::kDsStages; ++d) mbarrier_init(smem.ds_full[d], Config::kMmaWarps);
  mbarrier_init(smem.ds_empty, Config::kMmaWarps);
  for (int w = 0; w < Config::kDqWriters; ++w) {
    mbarrier_init(smem.dq_full[w], Config::kMmaWarps);
    mbarrier_init(smem.dq_empty[w], 1);
  }
  mbarrier_init_fence();
}

}  // namespace dash
