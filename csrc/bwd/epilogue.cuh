// The end of a chain: dK and dV leave the registers.
#pragma once

#include "fragment_order.cuh"
#include "fragment_store.cuh"
#include "kv_fragment.cuh"
#include "params.h"

namespace dash {

template <typename Element>
__device__ __forceinline__ Element* head_of(TensorView const& t, int batch, int head) {
  return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
}

// An MMA thread's share of dK or dV, straight from registers to global memory: K and V are free for
// the next chain's loads meanwhile. To `output`, scaled, or as it is to `parts` where that is given
// because other chains have the rest of the sum.
template <typename Element, typename Config, int kSize>
__device__ __forceinline__ void store_kv_gradient(float const (&gradient)[kSize], float scale,
                                                  TensorView const& output, float* parts,
                                                  MainParams const& params,
                                                  StepDescriptor const& step, int mma_thread) {
  using Fragment = KvFragment<Config>;
  Problem const& p = params.problem;
  if (parts != nullptr) {
    int const head = step.batch * p.kv_heads + step.kv_head;
    int64_t const chain = int64_t{head} * p.kv_tiles() + step.kv_tile;
    keep_fragment<Fragment>(Fragment::tile(parts, chain), gradient, mma_thread);
    return;
  }
  store_fragment(gradient, scale, head_of<Element>(output, step.batch, step.kv_head),
                 output.seq_stride, step.kv_tile * Config::kTileKv + Fragment::row(mma_thread), 0,
                 p.seqlen_k, params.head_dim);
}

}  // namespace dash
