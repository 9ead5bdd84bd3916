// Loads by the copy engine. Each announces its arrival on an mbarrier that already expects its
// bytes.
#pragma once

#include <cuda.h>

#include "mbarrier.cuh"

namespace dash {

__device__ __forceinline__ void prefetch_tensor_map(CUtensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// A box of a (batch, heads, seqlen, head_dim) tensor map; elements outside the tensor arrive as
// zeros.
__device__ __forceinline__ void tma_load(void* shared, CUtensorMap const& map, Mbarrier& barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(&barrier)), "r"(column), "r"(row),
      "r"(head), "r"(batch)
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
