// An MMA thread's share of a private fp32 tile, out of registers and back. The tile is in fragment
// order (kv_fragment.cuh, dq_fragment.cuh), in shared or in global memory.
#pragma once

namespace dash {

template <typename Fragment>
__device__ __forceinline__ void keep_fragment(float4* tile, float const (&x)[Fragment::kSize],
                                              int mma_thread) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize / 4; ++i)
    tile[Fragment::float4_index(mma_thread, i)] =
        make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

// Streaming: this is the sums' last use.
template <typename Fragment>
__device__ __forceinline__ void load_fragment(float (&x)[Fragment::kSize], float4 const* tile,
                                              int mma_thread) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize / 4; ++i) {
    float4 const loaded = __ldcs(tile + Fragment::float4_index(mma_thread, i));
    x[4 * i] = loaded.x;
    x[4 * i + 1] = loaded.y;
    x[4 * i + 2] = loaded.z;
    x[4 * i + 3] = loaded.w;
  }
}

}  // namespace dash
