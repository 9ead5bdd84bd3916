// The dealer: how a CTA comes to its next ticket. Nothing needs a cooperative launch, for any
// strategy and for packs that mix them. docs/schedules.md, "Progress", has the proofs.
//
// A dense call deals circles; an acyclic ticket is a circle by itself and comes from a counter. For
// a cyclic strategy CTAs form squads of as many as a circle has tickets, and a squad takes a
// circle: each member has its own ticket of it. So the chains that wait for each other are always
// on the same CTAs, which end and begin together; dealt one by one they drift apart (full 512: 6 to
// 9%).
//   All CTAs of the grid have arrived, which is the rule: squad s of S takes circles s, s + S, …,
//   and asks nobody. Some have not for a while, because another kernel holds SMs: from then on
//   complete squads take circles from the counter. Their first member does, and tells the others:
//   it may be ahead of them by kCirclesAhead, because its chains wait for theirs but in the few
//   steps planned ahead.
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
  int* mode;      // a SquadMode
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

__device__ __forceinline__ uint32_t cycles() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
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

// How circles are dealt is decided once a call: 0 until then.
enum SquadMode : int { kByNumber = 1, kByCounter = 2 };

// One CTA's place in its squad, and how far the squad has come.
struct SquadMember {
  int squad, member;
  int squads;   // that share all circles by number; 0: they come from the counter
  int circles;  // taken so far
  int last;     // of them
};

__device__ __forceinline__ SquadMember join_squad(DealerCounters const& dealer, int squad_size,
                                                  int cta, int ctas) {
  constexpr uint32_t kPatience = 40'000;  // cycles, 20 µs; CTAs of an idle GPU arrive within 3
  int const arrival = atomicAdd(dealer.arrivals, 1);
  if (arrival == ctas - 1) atomicCAS(dealer.mode, 0, kByNumber);
  uint32_t const start = cycles();
  int mode;
  while ((mode = read_counter(dealer.mode)) == 0)
    if (cycles() - start > kPatience) atomicCAS(dealer.mode, 0, kByCounter);
  if (mode == kByNumber) return {cta / squad_size, cta % squad_size, ctas / squad_size, 0, -1};
  return {arrival / squad_size, arrival % squad_size, 0, 0, -1};
}

// The squad's next circle, `num_circles` when there is none.
__device__ __forceinline__ int deal_circle(DealerCounters const& dealer, SquadMember& me,
                                           int squad_size, int num_circles) {
  int const count = me.circles++;
  if (me.squads > 0)
    return me.squad < me.squads ? smaller(me.squad + count * me.squads, num_circles) : num_circles;
  int* const told = dealer.taken + me.squad * kCirclesAhead + count % kCirclesAhead;
  if (me.member == 0) {
    int const complete = (me.squad + 1) * squad_size;
    while (read_counter(dealer.arrivals) < complete &&
           read_counter(dealer.next) < num_circles);  // other squads do the work meanwhile
    me.last = smaller(atomicAdd(dealer.next, 1), num_circles);
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
