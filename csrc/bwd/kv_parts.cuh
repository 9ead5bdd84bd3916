// After the main kernel, where groups of query heads are split: dK and dV of a KV tile are the sums
// of its chains' parts, added in fp32 in ascending order of the slice, whoever was ready first. One
// CTA a KV tile and KV head.
#pragma once

#include "../sm90/grid_dependency.cuh"
#include "epilogue.cuh"
#include "fragment_order.cuh"
#include "params.h"
#include "sequence_table.cuh"

namespace dash {

// A KV tile of one KV head, and where its parts are.
struct KvTile {
  int64_t first_part;  // of slice 0; the next slice's is kv_tiles_of_head tiles on
  int slices;          // 1: its chain has stored the gradients itself
  int head, batch;
  int first_row, rows;  // in the tensors
};

template <typename Config>
__device__ __forceinline__ KvTile kv_tile_of_block(CallParams const& params, int block) {
  Problem const call = with_tiles<Config>(params.problem);
  auto const [number, head, batch] = tile_place(block, params.kv_tiles_of_head, call.kv_heads);
  KvTile at{.slices = call.group_split, .head = head, .batch = batch};
  int tile = number, used = call.seqlen_k, start = 0;
  bool reached = true;
  if (params.is_packed()) {
    PackedSequences const& s = params.packed;
    PackedTile const packed =
        packed_tile(s.cu_seqlens_k, s.seqused_k, s.batch, s.total_k, number, call.tile_kv);
    tile = packed.tile;
    used = packed.rows.used;
    start = packed.rows.start;
    reached = tile * call.tile_kv < used;
    if (reached) {
      at.slices = params.table.group_splits[packed.sequence];
      int const queries = used_of(s.cu_seqlens_q, s.seqused_q, packed.sequence, s.batch, s.total_q);
      reached = problem_of(call, queries, used).q_tiles_of(tile) > 0;
    }
  } else {
    reached = call.q_tiles_of(tile) > 0;
  }
  if (!reached) at.slices = 1;
  at.first_row = start + tile * call.tile_kv;
  at.rows = used - tile * call.tile_kv;
  at.first_part =
      int64_t{batch * call.kv_heads + head} * at.slices * params.kv_tiles_of_head + number;
  return at;
}

template <typename Element, typename Fragment>
__device__ __forceinline__ void sum_parts(float* parts, float scale, TensorView const& output,
                                          int head_dim, CallParams const& params,
                                          KvTile const& at) {
  float sum[Fragment::kSize];
  load_fragment<Fragment>(sum, Fragment::tile(parts, at.first_part), threadIdx.x);
  for (int slice = 1; slice < at.slices; ++slice) {
    float x[Fragment::kSize];
    int64_t const part = at.first_part + int64_t{slice} * params.kv_tiles_of_head;
    load_fragment<Fragment>(x, Fragment::tile(parts, part), threadIdx.x);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) sum[i] += x[i];
  }
  store_fragment(sum, scale,
                 head_of<Element>(output, at.batch, at.head) + at.first_row * output.seq_stride,
                 output.seq_stride, Fragment::row(threadIdx.x), 0, at.rows, head_dim);
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kMmaThreads, Config::kPartsCtasPerSm)
    sum_kv_parts(__grid_constant__ CallParams const params) {
  // For the conversion of dQ, the kernel before, which ends after the main kernel.
  wait_for_previous_kernel();
  if (params.is_packed() && *params.table.malformed) return;
  KvTile const at = kv_tile_of_block<Config>(params, blockIdx.x);
  if (at.slices == 1) return;
  sum_parts<Element, DvFragment<Config>>(params.dv_parts, 1.f, params.dv, params.head_dims.v,
                                         params, at);
  sum_parts<Element, DkFragment<Config>>(params.dk_parts, params.softmax_scale, params.dk,
                                         params.head_dims.qk, params, at);
}

}  // namespace dash
