// A hang looks like a slow kernel. In a build with DASH_WATCHDOG every spin owns a Watchdog: after
// four seconds it names the fact it waited for, with two numbers, and traps.
#pragma once

#include <cstdio>

namespace dash {

#ifdef DASH_WATCHDOG
class Watchdog {
 public:
  __device__ Watchdog(char const* fact, int first, int second)
      : fact_(fact), first_(first), second_(second), start_(nanoseconds()) {}

  __device__ void check() const {
    if (nanoseconds() - start_ < kLimit) return;
    printf("dash watchdog: block %d thread %d waits for %s (%d, %d)\n", blockIdx.x, threadIdx.x,
           fact_, first_, second_);
    __trap();
  }

 private:
  static constexpr long long kLimit = 4'000'000'000;

  __device__ static long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }

  char const* fact_;
  int first_, second_;
  long long start_;
};
#else
class Watchdog {
 public:
  __device__ Watchdog(char const*, int, int) {}
  __device__ void check() const {}
};
#endif

}  // namespace dash
