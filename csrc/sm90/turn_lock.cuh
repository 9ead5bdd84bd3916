// The turn lock: the only way to touch a turn counter. One counter orders the adds to one q tile of
// dQ; turn t may add when the counter equals t, and passes t + 1 on when its add has been
// performed.
//
// Guarantee: what the holder of turn t wrote through the copy engine and waited for with
// bulk_wait_complete() happens before anything the holder of turn t + 1 issues after wait_turn().
//   pass_turn: the proxy fence orders the completed bulk writes before the release.
//   wait_turn: the acquire pairs with that release; the proxy fence orders it before the bulk
//              operations that follow, which use the async proxy.
// Sums and counters are global, so fences of the global state space are enough.
// Both are called by the one thread that issues the bulk operations. wait_last_turn is for whoever
// reads the finished sum by ordinary loads: its acquire pairs with the last pass_turn.
#pragma once

#include "bulk_reduce.cuh"
#include "watchdog.cuh"

namespace dash {

__device__ __forceinline__ int acquire_turn(int const* turn_counter) {
  int now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn_counter) : "memory");
  return now;
}

__device__ __forceinline__ void wait_turn(int const* turn_counter, int turn) {
  Watchdog const watchdog("turn", turn, 0);
#ifndef DASH_SKIP_TURNS  // benchmarks only: what would the kernel cost if nobody waited?
  int now;
  do {
    now = acquire_turn(turn_counter);
    watchdog.check();
  } while (now != turn);
#endif
  fence_proxy_async_global();
}

__device__ __forceinline__ void wait_last_turn(int const* turn_counter, int turns) {
#ifndef DASH_SKIP_TURNS  // there turns are passed in any order, and the last may not be seen
  constexpr unsigned kPollNanoseconds = 200;
  Watchdog const watchdog("last turn", turns, 0);
  while (acquire_turn(turn_counter) != turns) {
    watchdog.check();
    __nanosleep(kPollNanoseconds);
  }
#endif
}

__device__ __forceinline__ void pass_turn(int* turn_counter, int next_turn) {
  fence_proxy_async_global();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn_counter), "r"(next_turn)
               : "memory");
}

}  // namespace dash
