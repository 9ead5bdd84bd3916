// Beside the end of the main kernel: the fp32 sums of dQ, times softmax_scale, in the output type.
// One CTA a q tile. It runs on SMs that the main kernel has left and waits for its tile's last
// turn, not for the kernel.
#pragma once

#include "../sm90/grid_dependency.cuh"
#include "../sm90/turn_lock.cuh"
#include "dq_fragment.cuh"
#include "epilogue.cuh"
#include "fragment_order.cuh"
#include "params.h"

namespace dash {

template <typename Element, typename Config>
__device__ __forceinline__ void convert_tile(MainParams const& params, int dq_tile) {
  using Fragment = DqFragment<Config>;
  Problem const& p = params.problem;
  auto const [q_tile, head, batch] = tile_place(dq_tile, params.q_tiles, p.heads);
  int const turns = p.kv_tiles_of(q_tile);
  if (turns == 0) return;  // preprocess wrote this tile's zeros; its sum was never stored

  if (threadIdx.x == 0) wait_last_turn(params.dq_turns + dq_tile, turns);
  __syncthreads();
  auto const* const sums =
      reinterpret_cast<float4 const*>(params.dq_accum + int64_t{dq_tile} * Config::kDqTileFloats);
  float x[Fragment::kSize];
  load_fragment<Fragment>(x, sums, threadIdx.x);
  store_fragment(x, params.softmax_scale, head_of<Element>(params.dq, batch, head),
                 params.dq.seq_stride, q_tile * Config::kTileQ + Fragment::row(threadIdx.x),
                 Fragment::column(threadIdx.x), p.seqlen_q, params.head_dim);
}

inline constexpr int kConvertCtasPerSm = 5;  // said, because ptxas guesses 6 and spills

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kMmaThreads, kConvertCtasPerSm)
    convert_dq(__grid_constant__ MainParams const params) {
  convert_tile<Element, Config>(params, blockIdx.x);
  // What comes next in the stream waits for this kernel alone, and must find dK and dV complete.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

}  // namespace dash
