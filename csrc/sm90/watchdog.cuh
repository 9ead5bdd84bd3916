// A hang looks like a slow kernel. In a build with DASH_WATCHDOG every spin owns a Watchdog: after
// about four seconds it names the fact it waited for, with two numbers, and traps.
#pragma once

#include <cstdio>

namespace dash {

#ifdef DASH_WATCHDOG
class Watchdog {
 public:
  __device__ Watchdog(char const* fact, int first, int second)
      : fact_(fact), first_(first), second_(second), start_(clock64()) {}

  __device__ void check() const {
    if (clock64() - start_ < kLimitCycles) return;
    printf("dash watchdog: block %d thread %d waits for %s (%d, %d)\n", blockIdx.x, threadIdx.x,
           fact_, first_, second_);
    __trap();
  }

 private:
  static constexpr long long kLimitCycles = 1ll << 33;
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
