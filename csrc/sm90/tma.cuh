// Loads by the copy engine. Each announces its arrival on an mbarrier that already expects its
// bytes.
#pragma once

#include <cuda.h>

#include "mbarrier.cuh"

namespace dash {

__device__ __forceinline__ void prefetch_tensor_map(CUtensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// The rows of a packed tensor are addressed from the end of their sequence: row r of a sequence of
// `length` rows that starts at row `start` is at (row kPackedRows - length + r, slab start +
// length, wrap kPackedRows). The dimensions `row` and `slab` both have the row stride s, and `wrap`
// has 2^34 - s bytes, so that the address is start + r rows modulo 2^64, while `row` leaves its
// range exactly where the sequence ends. There a box is filled with zeros and no neighbour is read.
// A dense tensor's slab is the batch, and wrap is 0.
inline constexpr int kPackedRows = 1 << 30;
inline constexpr int kTensorRank = 5;

// A box of a (head_dim, row, slab, wrap, head) tensor map; elements outside arrive as zeros.
__device__ __forceinline__ void tma_load(void* shared, CUtensorMap const& map, Mbarrier& barrier,
                                         int column, int row, int slab, int wrap, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(&barrier)), "r"(column), "r"(row),
      "r"(slab), "r"(wrap), "r"(head)
      : "memory");
}

// Contiguous bytes: a multiple of 16, both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* shared, void const* global, int bytes,
                                          Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

}  // namespace dash
