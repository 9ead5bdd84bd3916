// Where an MMA thread's share of a KV tile's dK or dV lies: in the tile, and in the fp32 parts of a
// split group, which are private and keep fragment order, so that a warp's accesses are contiguous.
#pragma once

#include "config.h"

namespace dash {

template <typename Config, int kColumns>
struct KvFragment {
  static constexpr int kTileFloats = Config::kTileKv * kColumns;
  static constexpr int kSize = kTileFloats / Config::kMmaThreads;  // floats a thread holds

  // Origin of the warp's 16 rows, which have all columns.
  static constexpr int row(int mma_thread) { return mma_thread / kWarp * 16; }

  static constexpr int float4_index(int mma_thread, int i) {
    return i * Config::kMmaThreads + mma_thread;
  }
  __device__ static float4* tile(float* parts, int64_t index) {
    return reinterpret_cast<float4*>(parts + index * kTileFloats);
  }
};

template <typename Config>
using DkFragment = KvFragment<Config, Config::kHeadDim>;
template <typename Config>
using DvFragment = KvFragment<Config, Config::kHeadDimV>;

}  // namespace dash
