// The end of a chain: dK and dV leave the registers.
#pragma once

#include "fragment_store.cuh"
#include "params.h"

namespace dash {

template <typename Element>
__device__ __forceinline__ Element* head_of(TensorView const& t, int batch, int head) {
  return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
}

// Straight from registers to global memory: K and V are free for the next chain's loads meanwhile.
template <typename Element, typename Config, int kSize>
__device__ __forceinline__ void store_kv_gradients(MainParams const& params,
                                                   StepDescriptor const& step,
                                                   float const (&dk)[kSize],
                                                   float const (&dv)[kSize], int kv_row) {
  int const row = step.kv_tile * Config::kTileKv + kv_row;
  int const rows = params.problem.seqlen_k;
  store_fragment(dv, 1.f, head_of<Element>(params.dv, step.batch, step.kv_head),
                 params.dv.seq_stride, row, 0, rows, params.head_dim);
  store_fragment(dk, params.softmax_scale, head_of<Element>(params.dk, step.batch, step.kv_head),
                 params.dk.seq_stride, row, 0, rows, params.head_dim);
}

}  // namespace dash
