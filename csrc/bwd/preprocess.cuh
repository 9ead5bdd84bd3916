// Before the main kernel: −delta, lse·log2 e, counters, and the gradients nothing will reach.
//
// One CTA a q tile. It also writes the padding rows of the two vectors, so that the main kernel
// copies whole tiles of them: lse_log2 = +inf makes P = 0 there, and finite −delta dS = 0.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include "../sm90/grid_dependency.cuh"
#include "epilogue.cuh"
#include "params.h"

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

template <typename Element, typename Config>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess(__grid_constant__ PreprocessParams const params) {
  constexpr int kLanes = Config::kHeadDim / 8;  // threads a row, sixteen bytes each
  constexpr int kRows = kPreprocessThreads / kLanes;
  constexpr int kPasses = Config::kTileQ / kRows;
  constexpr float kInfinity = INFINITY;

  allow_next_kernel();
  Problem const& p = params.problem;
  int const dq_tile = blockIdx.x;
  auto const [q_tile, head, batch] = tile_place(dq_tile, p.q_tiles(), p.heads);
  if (threadIdx.x == 0) {
    params.dq_turns[dq_tile] = 0;
    if (dq_tile == 0) *params.next_ticket = 0;
  }

  int const column = threadIdx.x % kLanes * 8;
  int const first_in_tile = threadIdx.x / kLanes;
  int const first_row = q_tile * Config::kTileQ + first_in_tile;
  bool const column_exists = column < params.head_dim;
  auto const exists = [&](int pass) {
    return column_exists && first_row + pass * kRows < p.seqlen_q;
  };
  auto const row_of = [&](auto* head_data, TensorView const& t, int pass) {
    return head_data + (first_row + pass * kRows) * t.seq_stride + column;
  };

  // All loads before the first use: the kernel is as fast as bytes are in flight.
  Element const* const out = head_of<Element>(params.out, batch, head);
  Element const* const dout = head_of<Element>(params.dout, batch, head);
  float const* const lse =
      params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride;
  uint4 o[kPasses], d[kPasses];
  float row_lse[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    o[pass] = d[pass] = make_uint4(0, 0, 0, 0);
    row_lse[pass] = kInfinity;
    if (!exists(pass)) continue;
    o[pass] = __ldcs(reinterpret_cast<uint4 const*>(row_of(out, params.out, pass)));
    d[pass] = *reinterpret_cast<uint4 const*>(row_of(dout, params.dout, pass));
    if (column == 0) row_lse[pass] = lse[(first_row + pass * kRows) * params.lse.seq_stride];
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float delta = dot_16_bytes<Element>(o[pass], d[pass]);
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      delta += __shfl_xor_sync(0xffffffff, delta, distance);
    if (column == 0) {
      bool const has_keys = fabsf(row_lse[pass]) != kInfinity;
      int64_t const padded_row = int64_t{dq_tile} * Config::kTileQ + first_in_tile + pass * kRows;
      params.lse_log2[padded_row] = has_keys ? row_lse[pass] * kLog2E : kInfinity;
      params.minus_delta[padded_row] = has_keys ? -delta : 0.f;
    }
  }

  if (p.kv_tiles_of(q_tile) == 0) {
    Element* const dq = head_of<Element>(params.dq, batch, head);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      if (exists(pass))
        *reinterpret_cast<uint4*>(row_of(dq, params.dq, pass)) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace dash
