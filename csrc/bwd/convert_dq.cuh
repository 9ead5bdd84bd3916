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
#include "sequence_table.cuh"

namespace dash {

template <typename Element, typename Config>
__device__ __forceinline__ void convert_tile(CallParams const& params, int dq_tile) {
  using Fragment = DqFragment<Config>;
  Problem const call = with_tiles<Config>(params.problem);
  auto [q_tile, head, batch] = tile_place(dq_tile, params.dq_tiles_of_head, call.heads);
  int turns, first_row = 0, rows;
  if (params.is_packed()) {
    PackedSequences const& s = params.packed;
    PackedTile const at =
        packed_tile(s.cu_seqlens_q, s.seqused_q, s.batch, s.total_q, q_tile, Config::kTileQ);
    if (at.tile * Config::kTileQ >= at.rows.used) return;
    Problem const p = problem_of(
        call, at.rows.used, used_of(s.cu_seqlens_k, s.seqused_k, at.sequence, s.batch, s.total_k));
    q_tile = at.tile;
    turns = p.kv_tiles_of(q_tile);
    first_row = at.rows.start;
    rows = at.rows.used;
  } else {
    turns = call.kv_tiles_of(q_tile);
    rows = call.seqlen_q;
  }
  if (turns == 0) return;  // preprocess wrote this tile's zeros; its sum was never stored

  if (threadIdx.x == 0) wait_last_turn(params.dq_turns + dq_tile, turns);
  __syncthreads();
  auto const* const sums =
      reinterpret_cast<float4 const*>(params.dq_accum + int64_t{dq_tile} * Config::kDqTileFloats);
  float x[Fragment::kSize];
  load_fragment<Fragment>(x, sums, threadIdx.x);
  store_fragment(x, params.softmax_scale,
                 head_of<Element>(params.dq, batch, head) + first_row * params.dq.seq_stride,
                 params.dq.seq_stride, q_tile * Config::kTileQ + Fragment::row(threadIdx.x),
                 Fragment::column(threadIdx.x), rows, params.head_dims.qk);
}

// cu_seqlens made no sense, and the host cannot know: nothing was computed, and it shows.
template <typename Element>
__device__ __forceinline__ void fill_with_nan(TensorView const& t, int rows, int heads,
                                              int head_dim, int block, int blocks, int threads) {
  uint4 const nan = make_uint4(0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff);  // of 16-bit types
  for (int64_t at = block; at < int64_t{rows} * heads; at += blocks) {
    Element* const row =
        head_of<Element>(t, 0, static_cast<int>(at % heads)) + at / heads * t.seq_stride;
    for (int column = threadIdx.x % threads * 8; column < head_dim; column += threads * 8)
      *reinterpret_cast<uint4*>(row + column) = nan;
  }
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kMmaThreads, Config::kConvertCtasPerSm)
    convert_dq(__grid_constant__ CallParams const params) {
  if (params.is_packed() && *params.table.malformed) {
    Problem const& p = params.problem;
    int const block = blockIdx.x, blocks = gridDim.x;
    fill_with_nan<Element>(params.dq, params.packed.total_q, p.heads, params.head_dims.qk, block,
                           blocks, Config::kMmaThreads);
    fill_with_nan<Element>(params.dk, params.packed.total_k, p.kv_heads, params.head_dims.qk, block,
                           blocks, Config::kMmaThreads);
    fill_with_nan<Element>(params.dv, params.packed.total_k, p.kv_heads, params.head_dims.v, block,
                           blocks, Config::kMmaThreads);
  } else {
    convert_tile<Element, Config>(params, blockIdx.x);
  }
  // What comes next in the stream waits for this kernel alone, and must find dK and dV complete.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

}  // namespace dash
