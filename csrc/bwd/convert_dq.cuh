// After the main kernel: the fp32 sums of dQ, times softmax_scale, in the output type. One CTA a q
// tile.
#pragma once

#include "../sm90/grid_dependency.cuh"
#include "dq_fragment.cuh"
#include "epilogue.cuh"
#include "params.h"

namespace dash {

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kMmaThreads)
    convert_dq(__grid_constant__ MainParams const params) {
  using Fragment = DqFragment<Config>;
  Problem const& p = params.problem;
  int const dq_tile = blockIdx.x;
  auto const [q_tile, head, batch] = tile_place(dq_tile, params.q_tiles, p.heads);
  // Preprocess wrote this tile's zeros; its sum was never stored. To leave before the wait is safe,
  // because each sequence's last q tile sees keys: some CTA always waits for the main kernel.
  if (p.kv_tiles_of(q_tile) == 0) return;

  wait_for_previous_kernel();
  auto const* const sums =
      reinterpret_cast<float4 const*>(params.dq_accum + int64_t{dq_tile} * Config::kDqTileFloats);
  float x[Fragment::kSize];
#pragma unroll
  for (int i = 0; i < Fragment::kSize / 4; ++i) {
    float4 const part = sums[Fragment::float4_index(threadIdx.x, i)];
    x[4 * i] = part.x;
    x[4 * i + 1] = part.y;
    x[4 * i + 2] = part.z;
    x[4 * i + 3] = part.w;
  }
  store_fragment(x, params.softmax_scale, head_of<Element>(params.dq, batch, head),
                 params.dq.seq_stride, q_tile * Config::kTileQ + Fragment::row(threadIdx.x),
                 Fragment::column(threadIdx.x), p.seqlen_q, params.head_dim);
}

}  // namespace dash
