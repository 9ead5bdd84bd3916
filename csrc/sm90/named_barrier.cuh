// Hardware barriers 1 … 15; 0 is __syncthreads. Thread counts are multiples of a warp.
#pragma once

namespace dash {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace dash
