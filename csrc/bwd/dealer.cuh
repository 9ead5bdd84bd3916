// The dealer: how a CTA comes to its next ticket. All tickets come from one counter, in order, for
// every strategy and for packs that mix them; nothing needs a cooperative launch.
//
// One rule: while the counter is inside the circle of the CTA's last ticket, the CTA waits. So no
// CTA holds two tickets of one circle. The counter only grows, hence who has seen it leave the
// circle may add to it. docs/schedules.md, "Progress", has the proof that everybody ends.
#pragma once

#include "../schedule/schedule.h"
#include "../sm90/watchdog.cuh"

namespace dash {

__device__ __forceinline__ Ticket read_counter(int const* counter) {
  int now;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// `last` is the CTA's last ticket, `end_of_circle` the first behind its circle. Tickets may run
// past the last one of a call, by one a CTA: then there is no more work.
__device__ __forceinline__ Ticket deal(int* counter, Ticket last, Ticket end_of_circle) {
  if (end_of_circle > last + 1) {
    Watchdog const watchdog("end of circle", last, end_of_circle);
    while (read_counter(counter) < end_of_circle) watchdog.check();
  }
  return atomicAdd(counter, 1);
}

}  // namespace dash
