// The dealer: how a CTA comes to its next ticket. One counter for every strategy and for packs that
// mix them; nothing needs a cooperative launch. docs/schedules.md, "Progress", has the proofs.
//
// A dense call deals circles, an acyclic ticket being a circle by itself. CTAs form squads of as
// many as a circle has tickets, in the order in which they arrive, and a squad takes a circle: each
// member has its own ticket of it. So the chains that wait for each other are always on the same
// CTAs, which end and begin together; dealt one by one they drift apart (full 512: 9%). The first
// member takes a circle when its squad is complete, and tells the others: it may be ahead of them
// by kCirclesAhead, because its chains wait for theirs but in the few steps that are planned ahead.
//
// A packed call, whose circles are of any size, deals tickets. One rule: while the counter is
// inside the circle of the CTA's last ticket, the CTA waits. So no CTA holds two tickets of one
// circle. The counter only grows, hence who has seen it leave the circle may add to it.
#pragma once

#include "../schedule/schedule.h"
#include "../sm90/watchdog.cuh"
#include "config.h"

namespace dash {

// Device memory of the dealer, reset by preprocess.
struct DealerCounters {
  int* next;      // circle of a dense call, ticket of a packed one
  int* arrivals;  // CTAs
  int* taken;     // (squads, kCirclesAhead): each squad's last circles plus 1, in a ring
};

__device__ __forceinline__ int read_counter(int const* counter) {
  int now;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

__device__ __forceinline__ void write_counter(int* counter, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// `last` is the CTA's last ticket, `end_of_circle` the first behind its circle. Tickets may run
// past the last one of a call, by one a CTA: then there is no more work.
__device__ __forceinline__ Ticket deal_ticket(int* next, Ticket last, Ticket end_of_circle) {
  if (end_of_circle > last + 1) {
    Watchdog const watchdog("end of circle", last, end_of_circle);
    while (read_counter(next) < end_of_circle) watchdog.check();
  }
  return atomicAdd(next, 1);
}

// One CTA's place in its squad, and how far the squad has come.
struct SquadMember {
  int squad, member;
  int circles;  // taken so far
  int last;     // of them
};

__device__ __forceinline__ SquadMember join_squad(DealerCounters const& counters, int squad_size) {
  int const arrival = atomicAdd(counters.arrivals, 1);
  return {arrival / squad_size, arrival % squad_size, 0, -1};
}

// The squad's next circle, `num_circles` when there is none.
__device__ __forceinline__ int deal_circle(DealerCounters const& counters, SquadMember& me,
                                           int squad_size, int num_circles) {
  int* const told = counters.taken + me.squad * kCirclesAhead + me.circles++ % kCirclesAhead;
  if (me.member == 0) {
    int const complete = (me.squad + 1) * squad_size;
    while (read_counter(counters.arrivals) < complete &&
           read_counter(counters.next) <
               num_circles);  // CTAs may be waiting for SMs that another kernel holds; other squads
                              // do the work then
    me.last = smaller(atomicAdd(counters.next, 1), num_circles);
    write_counter(told, me.last + 1);
  } else {
    Watchdog const watchdog("circle of the squad", me.squad, me.last);
    int now;
    while ((now = read_counter(told) - 1) <= me.last) watchdog.check();
    me.last = now;
  }
  return me.last;
}

}  // namespace dash
