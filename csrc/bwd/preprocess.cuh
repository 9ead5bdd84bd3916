// Before the main kernel: −delta, lse·log2 e, counters, the sequence table, and the gradients that
// nothing will reach.
//
// One CTA a q tile. It also writes the padding rows of the two vectors, so that the main kernel
// copies whole tiles of them: lse_log2 = +inf makes P = 0 there, and finite −delta dS = 0. Whether
// a row sees a key is the mask's word, never lse's: an infinite lse is part of the result.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include "../sm90/grid_dependency.cuh"
#include "epilogue.cuh"
#include "params.h"
#include "table_builder.cuh"

namespace dash {

inline constexpr int kPreprocessThreads = 256;

// The dot product of sixteen bytes of two rows, in fp32.
template <typename Element>
__device__ __forceinline__ float dot_16_bytes(uint4 const& a, uint4 const& b) {
  auto const* x = reinterpret_cast<Element const*>(&a);
  auto const* y = reinterpret_cast<Element const*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

// A CTA's rows of Q, dO and dQ.
struct QTile {
  int head, batch;
  int first_row;     // in the tensors
  int rows;          // that exist, in use or not; all others are another sequence's
  int used;          // that are part of the problem
  int keyless_rows;  // from its first row
  bool reached;      // some KV tile adds to its dQ
  int dq_tile;
};

__device__ __forceinline__ QTile q_tile_of(Problem const& p, int q_tile, int head, int batch,
                                           int start, int end, int dq_tile) {
  int const before = q_tile * p.tile_q, used = p.seqlen_q - before;
  return {.head = head,
          .batch = batch,
          .first_row = start + before,
          .rows = end - start - before,
          .used = used,
          .keyless_rows = p.keyless_rows() - before,
          .reached = used > 0 && p.kv_tiles_of(q_tile) > 0,
          .dq_tile = dq_tile};
}

__device__ __forceinline__ QTile q_tile_of_block(PreprocessParams const& params, int block) {
  Problem const& call = params.problem;
  if (!params.is_packed()) {
    auto const [q_tile, head, batch] = tile_place(block, call.q_tiles(), call.heads);
    return q_tile_of(call, q_tile, head, batch, 0, call.seqlen_q, block);
  }
  PackedSequences const& s = params.packed;
  int const tiles = params.q_blocks / call.heads, number = block % tiles, head = block / tiles;
  PackedTile const at =
      packed_tile(s.cu_seqlens_q, s.seqused_q, s.batch, s.total_q, number, call.tile_q);
  int const keys = at.sequence == s.batch
                       ? 0
                       : used_of(s.cu_seqlens_k, s.seqused_k, at.sequence, s.batch, s.total_k);
  return q_tile_of(problem_of(call, at.rows.used, keys), at.tile, head, 0, at.rows.start,
                   at.rows.end, head * params.dq_tiles_of_head + number);
}

template <typename Element, typename Config>
__device__ __forceinline__ void prepare_q_tile(PreprocessParams const& params, QTile const& at) {
  constexpr int kLanes = Config::kHeadDim / 8;  // threads a row, sixteen bytes each
  constexpr int kRows = kPreprocessThreads / kLanes;
  constexpr int kPasses = Config::kTileQ / kRows;
  constexpr float kInfinity = INFINITY;

  int const column = threadIdx.x % kLanes * 8;
  int const first_in_tile = threadIdx.x / kLanes;
  bool const column_exists = column < params.head_dim;
  auto const row_in_tile = [&](int pass) { return first_in_tile + pass * kRows; };
  auto const row_of = [&](auto* head_data, TensorView const& t, int pass) {
    return head_data + (at.first_row + row_in_tile(pass)) * t.seq_stride + column;
  };

  // All loads before the first use: the kernel is as fast as bytes are in flight.
  Element const* const out = head_of<Element>(params.out, at.batch, at.head);
  Element const* const dout = head_of<Element>(params.dout, at.batch, at.head);
  float const* const lse =
      params.lse.data + at.batch * params.lse.batch_stride + at.head * params.lse.head_stride;
  uint4 o[kPasses], d[kPasses];
  float row_lse[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    o[pass] = d[pass] = make_uint4(0, 0, 0, 0);
    row_lse[pass] = kInfinity;
    if (!column_exists || row_in_tile(pass) >= at.used) continue;
    o[pass] = __ldcs(reinterpret_cast<uint4 const*>(row_of(out, params.out, pass)));
    d[pass] = *reinterpret_cast<uint4 const*>(row_of(dout, params.dout, pass));
    if (column == 0)
      row_lse[pass] = lse[(at.first_row + row_in_tile(pass)) * params.lse.seq_stride];
  }
  if (at.used > 0) {
    if (threadIdx.x == 0) params.dq_turns[at.dq_tile] = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float delta = dot_16_bytes<Element>(o[pass], d[pass]);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2)
        delta += __shfl_xor_sync(0xffffffff, delta, distance);
      if (column == 0) {
        int const row = row_in_tile(pass);
        bool const has_keys = row >= at.keyless_rows && row < at.used;
        int64_t const padded_row = int64_t{at.dq_tile} * Config::kTileQ + row;
        params.lse_log2[padded_row] = has_keys ? row_lse[pass] * kLog2E : kInfinity;
        params.minus_delta[padded_row] = has_keys ? -delta : 0.f;
      }
    }
  }

  // Nobody adds to these rows of dQ.
  int const first_zero = at.reached ? at.used : 0;
  if (first_zero >= smaller(at.rows, Config::kTileQ) || !column_exists) return;
  Element* const dq = head_of<Element>(params.dq, at.batch, at.head);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass)
    if (row_in_tile(pass) >= first_zero && row_in_tile(pass) < at.rows)
      *reinterpret_cast<uint4*>(row_of(dq, params.dq, pass)) = make_uint4(0, 0, 0, 0);
}

// Rows of dK and dV, in all heads.
struct KvRows {
  int batch;
  int first, end;
};

// Those of a KV tile that no chain will write: a KV tile that no row sees has no chain, and rows
// that are not in use belong to none.
__device__ __forceinline__ KvRows unreached_kv_rows(PreprocessParams const& params, int block) {
  Problem const& call = params.problem;
  if (!params.is_packed()) {
    int const tile = block % call.kv_tiles(), first = tile * call.tile_kv;
    int const end = smaller(first + call.tile_kv, call.seqlen_k);
    return {block / call.kv_tiles(), call.q_tiles_of(tile) > 0 ? end : first, end};
  }
  PackedSequences const& s = params.packed;
  PackedTile const at =
      packed_tile(s.cu_seqlens_k, s.seqused_k, s.batch, s.total_k, block, call.tile_kv);
  int const queries = at.sequence == s.batch
                          ? 0
                          : used_of(s.cu_seqlens_q, s.seqused_q, at.sequence, s.batch, s.total_q);
  Problem const p = problem_of(call, queries, at.rows.used);
  int const first = at.rows.start + at.tile * call.tile_kv;
  int const used_end = at.rows.start + at.rows.used;
  bool const reached = first < used_end && p.q_tiles_of(at.tile) > 0;
  return {0, reached ? larger(first, used_end) : first, smaller(first + call.tile_kv, at.rows.end)};
}

template <typename Element>
__device__ __forceinline__ void clear_rows(TensorView const& t, KvRows const& rows, int heads,
                                           int head_dim) {
  int const chunks = head_dim / 8;  // of sixteen bytes
  for (int64_t i = threadIdx.x; i < int64_t{rows.end - rows.first} * heads * chunks;
       i += kPreprocessThreads) {
    int const row = rows.first + static_cast<int>(i / (heads * chunks));
    int const in_row = static_cast<int>(i % (heads * chunks));
    Element* const at = head_of<Element>(t, rows.batch, in_row / chunks) + row * t.seq_stride;
    *reinterpret_cast<uint4*>(at + in_row % chunks * 8) = make_uint4(0, 0, 0, 0);
  }
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess(__grid_constant__ PreprocessParams const params) {
  allow_next_kernel();
  int block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0) *params.next_ticket = 0;
  if (params.is_packed()) {
    if (block == 0) {  // the first, because it takes longest
      using Builder = TableBuilder<kPreprocessThreads>;
      __shared__ typename Builder::Shared shared;
      Builder(params, shared, threadIdx.x).run();
      return;
    }
    --block;
  }
  if (block < params.q_blocks) {
    prepare_q_tile<Element, Config>(params, q_tile_of_block(params, block));
    return;
  }
  KvRows const rows = unreached_kv_rows(params, block - params.q_blocks);
  clear_rows<Element>(params.dk, rows, params.problem.kv_heads, params.head_dim);
  clear_rows<Element>(params.dv, rows, params.problem.kv_heads, params.head_dim);
}

}  // namespace dash
