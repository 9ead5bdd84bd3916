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

__device__ __forceinline__ void reset(DealerCounters const& dealer, int squads) {
  if (threadIdx.x == 0) *dealer.next = *dealer.arrivals = *dealer.mode = 0;
  for (int i = threadIdx.x; i < squads * kCirclesAhead; i += kPreprocessThreads)
    dealer.taken[i] = 0;
}

// A CTA's rows of Q, dO and dQ.
struct QTile {
  Problem problem;  // of its sequence
  int q_tile, head, batch;
  int first_row;  // in the tensors
  int rows;       // that exist, in use or not; all others are another sequence's
  int used;       // that are part of the problem
  int dq_tile;
};

template <typename Config>
__device__ __forceinline__ QTile dense_q_tile(PreprocessParams const& params, int block) {
  Problem const call = with_tiles<Config>(params.problem);
  auto const [q_tile, head, batch] = tile_place(block, call.q_tiles(), call.heads);
  int const first_row = q_tile * call.tile_q, rows = call.seqlen_q - first_row;
  return {call, q_tile, head, batch, first_row, rows, rows, block};
}

template <typename Config>
__device__ __forceinline__ QTile packed_q_tile(PreprocessParams const& params, int block) {
  Problem const call = with_tiles<Config>(params.problem);
  PackedSequences const& s = params.packed;
  int const tiles = params.q_blocks / call.heads, number = block % tiles, head = block / tiles;
  PackedTile const at =
      packed_tile(s.cu_seqlens_q, s.seqused_q, s.batch, s.total_q, number, call.tile_q);
  int const keys = at.sequence == s.batch
                       ? 0
                       : used_of(s.cu_seqlens_k, s.seqused_k, at.sequence, s.batch, s.total_k);
  int const before = at.tile * call.tile_q;
  return {problem_of(call, at.rows.used, keys),
          at.tile,
          head,
          0,
          at.rows.start + before,
          at.rows.end - at.rows.start - before,
          at.rows.used - before,
          head * params.dq_tiles_of_head + number};
}

// −delta and lse·log2 e of a q tile, and its turn counter. Rows that are not in use read another's
// values and drop them: a load that no branch guards can wait for its use.
template <typename Element, typename Config>
__device__ __forceinline__ void prepare_q_tile(PreprocessParams const& params, QTile const& at) {
  constexpr int kLanes = Config::kHeadDimV / 8;  // threads a row, sixteen bytes each
  constexpr int kRows = kPreprocessThreads / kLanes;
  constexpr int kPasses = Config::kTileQ / kRows;
  constexpr float kInfinity = INFINITY;

  int const lane = threadIdx.x % kLanes;
  int const first_in_tile = threadIdx.x / kLanes;
  bool const column_exists = lane * 8 < params.head_dims.v;
  int const column = column_exists ? lane * 8 : 0;
  auto const row_of = [&](int pass) {
    return at.first_row + smaller(first_in_tile + pass * kRows, at.used - 1);
  };
  Element const* const out = head_of<Element>(params.out, at.batch, at.head) + column;
  Element const* const dout = head_of<Element>(params.dout, at.batch, at.head) + column;
  float const* const lse =
      params.lse.data + at.batch * params.lse.batch_stride + at.head * params.lse.head_stride;

  float const* const dlse =
      params.dlse.data + at.batch * params.dlse.batch_stride + at.head * params.dlse.head_stride;

  // All loads before the first use: the kernel is as fast as bytes are in flight.
  uint4 o[kPasses], d[kPasses];
  float row_lse[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    int const row = row_of(pass);
    o[pass] = __ldcs(reinterpret_cast<uint4 const*>(out + row * params.out.seq_stride));
    d[pass] = *reinterpret_cast<uint4 const*>(dout + row * params.dout.seq_stride);
    row_lse[pass] = lse[row * params.lse.seq_stride];
  }
  if (threadIdx.x == 0) params.dq_turns[at.dq_tile] = 0;
  int const keyless_rows = at.problem.keyless_rows() - at.q_tile * Config::kTileQ;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float delta = column_exists ? dot_16_bytes<Element>(o[pass], d[pass]) : 0.f;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      delta += __shfl_xor_sync(0xffffffff, delta, distance);
    if (lane == 0) {
      int const row = first_in_tile + pass * kRows;
      bool const has_keys = row >= keyless_rows && row < at.used;
      int64_t const padded_row = int64_t{at.dq_tile} * Config::kTileQ + row;
      params.lse_log2[padded_row] = (has_keys ? row_lse[pass] : kInfinity) * params.lse_factor;
      float minus_delta = has_keys ? -delta : 0.f;
      if (has_keys && params.dlse.data != nullptr)
        minus_delta += dlse[(at.first_row + row) * params.dlse.seq_stride];
      params.minus_delta[padded_row] = minus_delta;
    }
  }
}

// Rows of dQ that nobody adds to.
template <typename Element, typename Config>
__device__ __forceinline__ void clear_unreached_q(PreprocessParams const& params, QTile const& at) {
  bool const reached = at.used > 0 && at.problem.kv_tiles_of(at.q_tile) > 0;
  int const end = smaller(at.rows, Config::kTileQ), chunks = params.head_dims.qk / 8;
  Element* const dq = head_of<Element>(params.dq, at.batch, at.head);
  int const first = reached ? at.used : 0;
  for (int i = threadIdx.x; i < (end - first) * chunks; i += kPreprocessThreads) {
    int const row = at.first_row + first + i / chunks;
    *reinterpret_cast<uint4*>(dq + row * params.dq.seq_stride + i % chunks * 8) =
        make_uint4(0, 0, 0, 0);
  }
}

// Rows of dK and dV, in all heads.
struct KvRows {
  int batch;
  int first, end;
};

// Those of a KV tile that no chain will write: a KV tile that no row sees has no chain, and rows
// that are not in use belong to none.
template <typename Config>
__device__ __forceinline__ KvRows dense_unreached_rows(PreprocessParams const& params, int block) {
  Problem const call = with_tiles<Config>(params.problem);
  int const tile = block % call.kv_tiles(), first = tile * call.tile_kv;
  int const end = smaller(first + call.tile_kv, call.seqlen_k);
  return {block / call.kv_tiles(), call.q_tiles_of(tile) > 0 ? end : first, end};
}

template <typename Config>
__device__ __forceinline__ KvRows packed_unreached_rows(PreprocessParams const& params, int block) {
  Problem const call = with_tiles<Config>(params.problem);
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

template <typename Element>
__device__ __forceinline__ void clear_kv_rows(PreprocessParams const& params, KvRows const& rows) {
  clear_rows<Element>(params.dk, rows, params.problem.kv_heads, params.head_dims.qk);
  clear_rows<Element>(params.dv, rows, params.problem.kv_heads, params.head_dims.v);
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_dense(__grid_constant__ PreprocessParams const params) {
  allow_next_kernel();
  int const block = blockIdx.x;
  if (block == 0) reset(params.dealer, params.squads);
  if (block < params.q_blocks) {
    QTile const at = dense_q_tile<Config>(params, block);
    prepare_q_tile<Element, Config>(params, at);
    clear_unreached_q<Element, Config>(params, at);
  } else {
    clear_kv_rows<Element>(params, dense_unreached_rows<Config>(params, block - params.q_blocks));
  }
}

// The first CTA writes the sequence table, because that takes longest.
template <typename Element, typename Config>
__global__ void __launch_bounds__(kPreprocessThreads, 3)
    preprocess_packed(__grid_constant__ PreprocessParams const params) {
  using Builder = TableBuilder<kPreprocessThreads>;
  __shared__ typename Builder::Shared shared;
  allow_next_kernel();
  int const block = static_cast<int>(blockIdx.x) - 1;
  if (block < 0) {
    reset(params.dealer, 0);
    Builder(params, shared, threadIdx.x).run();
  } else if (block < params.q_blocks) {
    QTile const at = packed_q_tile<Config>(params, block);
    if (at.used > 0) prepare_q_tile<Element, Config>(params, at);
    clear_unreached_q<Element, Config>(params, at);
  } else {
    clear_kv_rows<Element>(params, packed_unreached_rows<Config>(params, block - params.q_blocks));
  }
}

}  // namespace dash
