// Where an MMA thread's share of a dQ tile lies: in the tile, and in the fp32 sums.
//
// The sums are private, so they keep fragment order: float4 i of MMA thread t of warpgroup w is
// element (w · fragment/4 + i) · 128 + t of the tile. A warp's accesses are contiguous 512 bytes,
// in shared memory (no bank conflict) and in global memory alike.
#pragma once

#include "config.h"

namespace dash {

template <typename Config>
struct DqFragment {
  static constexpr int kSize = Config::kDqFragment;  // floats a thread holds

  static constexpr int float4_index(int mma_thread, int i) {
    return (mma_thread / kWarpgroup * (kSize / 4) + i) * kWarpgroup + mma_thread % kWarpgroup;
  }
  // Origin of the warp's 16 rows by 64 columns in the q tile (products.cuh splits it this way).
  static constexpr int row(int mma_thread) {
    int const warp = Config::kDqByColumns ? mma_thread % kWarpgroup / kWarp : mma_thread / kWarp;
    return warp * 16;
  }
  static constexpr int column(int mma_thread) {
    return Config::kDqByColumns ? mma_thread / kWarpgroup * (Config::kHeadDim / 2) : 0;
  }
};

}  // namespace dash
