// Accumulator fragments to global memory in the output type, sixteen bytes a store, without shared
// memory. A warp's fragment is 16 rows: lane l holds rows l/4 and l/4 + 8, columns 8g + 2(l%4) +
// {0, 1}.
#pragma once

#include "launch.h"
#include "softmax_grad.cuh"

namespace dash {

// Four lanes hold words w[0…3]; afterwards lane i of the four holds word i of all four, in lane
// order.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
  constexpr uint32_t kAll = 0xffffffff;
  bool const odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t const received = __shfl_xor_sync(kAll, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t const received = __shfl_xor_sync(kAll, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = received;
  }
}

// Stores a fragment of 16 rows by kSize·2 columns, times `scale`. row0 and column0 are the
// fragment's origin in the tensor slice that `slice` points at; rows ≥ rows and columns ≥ columns
// are dropped. The store is streaming: nobody reads it here, and it would push Q, dO and the sums
// of dQ out of L2.
template <typename Element, int kSize>
__device__ __forceinline__ void store_fragment(float const (&x)[kSize], float scale, Element* slice,
                                               int64_t row_stride, int row0, int column0, int rows,
                                               int columns) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = row0 + lane / 4 + 8 * half;
#pragma unroll
    for (int g = 0; g < kSize / 4; g += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const at = 4 * (g + i) + 2 * half;
        words[i] = pack<Element>(x[at] * scale, x[at + 1] * scale);
      }
      transpose_quad(words, lane);
      int const column = column0 + 8 * (g + lane % 4);
      if (row < rows && column < columns)
        __stcs(reinterpret_cast<uint4*>(slice + row * row_stride + column),
               make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

}  // namespace dash
