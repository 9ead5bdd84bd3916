// The end of a chain: dK and dV leave the registers.
#pragma once

#include "fragment_store.cuh"
#include "params.h"

namespace dash {

template <typename Element>
__device__ __forceinline__ Element* head_of(TensorView const& t, int batch, int head) {
  return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
}

// A warp's 16 rows of dK or dV, straight from registers to global memory: K and V are free for the
// next chain's loads meanwhile.
template <typename Element, typename Config, int kSize>
__device__ __forceinline__ void store_kv_gradient(float const (&gradient)[kSize], float scale,
                                                  TensorView const& output,
                                                  MainParams const& params,
                                                  StepDescriptor const& step, int kv_row) {
  store_fragment(gradient, scale, head_of<Element>(output, step.batch, step.kv_head),
                 output.seq_stride, step.kv_tile * Config::kTileKv + kv_row, 0,
                 params.problem.seqlen_k, params.head_dim);
}

}  // namespace dash
