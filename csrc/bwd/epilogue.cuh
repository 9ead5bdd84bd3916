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
// the next chain's loads meanwhile. To `output`, scaled, or as it is to `parts` where other chains
// have the rest of the sum; null where no group is split. Fragment: DkFragment or DvFragment.
template <typename Element, typename Fragment>
__device__ __forceinline__ void store_kv_gradient(float const (&gradient)[Fragment::kSize],
                                                  float scale, TensorView const& output,
                                                  float* parts, int head_dim,
                                                  StepDescriptor const& step, int mma_thread) {
  if (parts != nullptr && step.parts_tile >= 0) {
    keep_fragment<Fragment>(Fragment::tile(parts, step.parts_tile), gradient, mma_thread);
    return;
  }
  Element* const tile =
      head_of<Element>(output, step.batch, step.kv_head) + step.kv_row * output.seq_stride;
  store_fragment(gradient, scale, tile, output.seq_stride, Fragment::row(mma_thread), 0,
                 step.columns, head_dim);
}

}  // namespace dash
