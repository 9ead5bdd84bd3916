// The planner: one thread that takes tickets, asks the schedule, and writes step descriptors. The
// only code of the kernel that knows a strategy. A warp of its own, so that the schedule's state
// costs no other role a register and its divisions no load a delay.
#pragma once

#include "../schedule/any_schedule.h"
#include "mask.h"
#include "shared_storage.h"

namespace dash {

template <typename Element, typename Config>
class Planner {
 public:
  using Storage = SharedStorage<Element, Config>;

  __device__ Planner(Storage& smem, MainParams const& params)
      : smem_(smem), params_(params), schedule_(params.strategy, params.problem) {}

  __device__ void run(int cta) {
    smem_.planned_ticket = cta - params_.num_ctas;
    while (take_ticket()) {
      int part = 0;
      do {
        smem_.planned_chain = schedule_.chain(smem_.planned_ticket, part);
        plan(smem_.planned_chain);
        part = smem_.planned_chain.part + 1;
      } while (part < schedule_.num_chains(smem_.planned_ticket));
    }
    // The MMA warpgroups stop at the first end; every dQ writer needs one in a stage of its own.
    for (int w = 0; w < Config::kDqWriters; ++w) post({.flags = kEndOfWork});
  }

 private:
  // The next ticket is taken while the last chain drains. Acyclic schedules allow that to any CTA.
  // In a cyclic one the drained chain may wait for the very ticket that is taken, if both are of
  // one group; tickets dealt out round robin never are, because a group has at most num_ctas of
  // them.
  __device__ bool take_ticket() {
    Ticket const ticket = params_.cyclic ? smem_.planned_ticket + params_.num_ctas
                                         : atomicAdd(params_.next_ticket, 1);
    smem_.planned_ticket = ticket;
    return ticket < params_.num_tickets;
  }

  // Ticket, chain and position stay in shared memory: 24 registers do not hold them (24 bytes of
  // spill), and the barrier in post() makes the compiler read them again at each use.
  __device__ void plan(Chain const& chain) {
    Problem const& p = params_.problem;
    int const rows = schedule_.num_rows(chain);
    int& position = smem_.planned_position;
    for (position = 0; position < rows; ++position) {
      Row const row = schedule_.row(chain, position);
      int flags = step_needs_mask(p, row.q_tile, chain.kv_tile) ? kMasked : 0;
      if (position == 0) flags |= kFirstOfChain;
      for (int member = 0; member < params_.group; ++member) {
        if (position == rows - 1 && member == params_.group - 1) flags |= kLastOfChain;
        int const head = chain.kv_head * params_.group + member;
        post({.dq_tile = (chain.batch * p.heads + head) * params_.q_tiles + row.q_tile,
              .turn = row.turn,
              .flags = flags,
              .q_tile = row.q_tile,
              .kv_tile = chain.kv_tile,
              .kv_head = chain.kv_head,
              .batch = chain.batch,
              .head = head});
        flags &= ~kFirstOfChain;
      }
    }
  }

  __device__ void post(StepDescriptor const& step) {
    int const slot = ring_.stage();
    mbarrier_wait(smem_.plan_empty[slot], ring_.parity() ^ 1, "plan_empty");
    smem_.plan[slot] = step;
    mbarrier_arrive(smem_.plan_full[slot]);
    ring_.advance();
  }

  Storage& smem_;
  MainParams const& params_;
  AnySchedule schedule_;
  Ring<Config::kPlannedSteps> ring_;
};

}  // namespace dash
