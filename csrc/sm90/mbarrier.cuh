// mbarriers in shared memory. A wait is by parity and sees one phase back, no more: whoever may
// skip a phase of a barrier needs a barrier of its own.
#pragma once

#include <cstdint>

#include "watchdog.cuh"

namespace dash {

using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine; the threads of the CTA need a barrier on
// top.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// One arrival that also announces `bytes` the copy engine will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_test(Mbarrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, uint32_t parity,
                                              char const* fact) {
  Watchdog const watchdog(fact, static_cast<int>(shared_address(&barrier)),
                          static_cast<int>(parity));
  while (!mbarrier_test(barrier, parity)) watchdog.check();
}

// Slot and parity of the n-th use of a ring of kSlots slots.
template <int kSlots>
__device__ __forceinline__ int slot_of(uint32_t n) {
  return n % kSlots;
}
template <int kSlots>
__device__ __forceinline__ uint32_t parity_of(uint32_t n) {
  return n / kSlots & 1;
}

// A position in a ring of kStages slots with the parity of the slot's current phase. A consumer
// waits for parity(); a producer for the slot's release, which is the phase before: parity() ^ 1,
// and that passes at once in the first round.
template <int kStages>
class Ring {
 public:
  __device__ explicit Ring(int first = 0) : stage_(first) {}
  __device__ int stage() const { return stage_; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void advance(int by = 1) {
    stage_ += by;
    if (stage_ >= kStages) {
      stage_ -= kStages;
      parity_ ^= 1;
    }
  }

 private:
  int stage_;
  uint32_t parity_ = 0;
};

}  // namespace dash
