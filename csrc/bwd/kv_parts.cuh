// After the main kernel, where groups of query heads are split: dK and dV of a KV tile are the sums
// of its chains' parts, added in fp32 in ascending order of the part, whoever was ready first. One
// CTA a KV tile and head of K.
#pragma once

#include "../sm90/grid_dependency.cuh"
#include "epilogue.cuh"
#include "fragment_order.cuh"
#include "params.h"

namespace dash {

template <typename Element, typename Config>
__device__ __forceinline__ void sum_parts(float* parts, float scale, TensorView const& output,
                                          MainParams const& params, int kv_tile, int head) {
  using Fragment = KvFragment<Config>;
  Problem const& p = params.problem;
  int const tiles = p.kv_tiles();
  int64_t const first = int64_t{head} * p.group_split * tiles + kv_tile;
  float sum[Fragment::kSize];
  load_fragment<Fragment>(sum, Fragment::tile(parts, first), threadIdx.x);
  for (int part = 1; part < p.group_split; ++part) {
    float x[Fragment::kSize];
    load_fragment<Fragment>(x, Fragment::tile(parts, first + int64_t{part} * tiles), threadIdx.x);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) sum[i] += x[i];
  }
  store_fragment(sum, scale, head_of<Element>(output, head / p.heads_of_k(), head % p.heads_of_k()),
                 output.seq_stride, kv_tile * Config::kTileKv + Fragment::row(threadIdx.x), 0,
                 p.seqlen_k, params.head_dim);
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kMmaThreads)
    sum_kv_parts(__grid_constant__ MainParams const params) {
  // For the conversion of dQ, the kernel before, which ends after the main kernel.
  wait_for_previous_kernel();
  int const tiles = params.problem.kv_tiles();
  int const kv_tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
  sum_parts<Element, Config>(params.dv_parts, 1.f, params.dv, params, kv_tile, head);
  sum_parts<Element, Config>(params.dk_parts, params.softmax_scale, params.dk, params, kv_tile,
                             head);
}

}  // namespace dash
