// Warpgroup matrix products on CuTe fragments: acc = [acc +] A·B, asynchronous.
//
// Between wgmma_begin() and the wgmma_wait that covers a product, its accumulator and its register
// operand belong to the tensor core; ptxas serialises the kernel when code touches them (C7514).
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace dash {

// Registers written by ordinary instructions become visible to the products that follow.
__device__ __forceinline__ void wgmma_begin() { cute::warpgroup_arrive(); }

// Waits until at most kPending committed products of this warpgroup are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}

// Issues and commits one product. a: (MMA, M, K) and b: (MMA, N, K) are descriptor or register
// fragments; acc: (MMA, M, N) in registers. With accumulate false the old contents are not read.
template <typename TiledMma, typename A, typename B, typename Acc>
__device__ __forceinline__ void wgmma_issue(TiledMma mma, A const& a, B const& b, Acc& acc,
                                            bool accumulate) {
  using namespace cute;
  mma.accumulate_ = accumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Tells the compiler that the tensor core writes `fragment` behind its back.
template <typename Fragment>
__device__ __forceinline__ void wgmma_fence(Fragment& fragment) {
  cute::warpgroup_fence_operand(fragment);
}

}  // namespace dash
