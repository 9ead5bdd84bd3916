// The planner: one warp that takes tickets, asks the schedule, and writes step descriptors. The
// only code of the kernel that knows a strategy. A warp of its own, so that the schedule's state
// costs no other role a register and its divisions no load a delay.
//
// A row is up to nine divisions, 2,500 cycles for a lone thread, and a step of the MMA warpgroups
// takes 3,400. So each lane asks for a row of its own, and the first lane posts them.
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
      : smem_(smem),
        state_(smem.planner),
        params_(params),
        schedule_(params.strategy, params.problem) {}

  __device__ void run(int cta) {
    if (first_lane()) {
      state_.ticket = cta - params_.num_ctas;
      state_.posted = 0;
    }
    while (take_ticket()) {
      int part = 0;
      do {
        plan_chain(part);
        part = state_.chain.part + 1;
      } while (part < schedule_.num_chains(state_.ticket));
    }
    if (!first_lane()) return;
    // The MMA warpgroups stop at the first end; every dQ writer needs one in a stage of its own.
    for (int w = 0; w < Config::kDqWriters; ++w) post({.flags = kEndOfWork});
  }

 private:
  // The next ticket is taken while the last chain drains. Acyclic schedules allow that to any CTA.
  // In a cyclic one the drained chain may wait for the very ticket that is taken, if both are of
  // one group; tickets dealt out round robin never are, because a group has at most num_ctas of
  // them.
  __device__ bool take_ticket() {
    __syncwarp();
    if (first_lane())
      state_.ticket =
          params_.cyclic ? state_.ticket + params_.num_ctas : atomicAdd(params_.next_ticket, 1);
    __syncwarp();
    return state_.ticket < params_.num_tickets;
  }

  __device__ void plan_chain(int part) {
    Chain const chain = schedule_.chain(state_.ticket, part);
    int const num_rows = schedule_.num_rows(chain);
    __syncwarp();  // all lanes have read what the first one overwrites
    if (first_lane()) {
      state_.chain = chain;
      state_.num_rows = num_rows;
      state_.position = 0;
    }
    __syncwarp();
    while (state_.position < state_.num_rows) {
      ask_for_rows();
      __syncwarp();
      if (first_lane()) {
        post_rows();
        state_.position += kWarp;
      }
      __syncwarp();
    }
  }

  __device__ void ask_for_rows() {
    int const position = state_.position + threadIdx.x % kWarp;
    if (position >= state_.num_rows) return;
    Row const row = schedule_.row(state_.chain, position);
    int flags = step_needs_mask(params_.problem, row.q_tile, state_.chain.kv_tile) ? kMasked : 0;
    if (position == 0) flags |= kFirstOfChain;
    if (position == state_.num_rows - 1) flags |= kLastOfChain;
    state_.rows[threadIdx.x % kWarp] = {row, flags};
  }

  // One step for each head of the group, heads innermost. What a step needs is read from shared
  // memory anew, because it has passed a barrier: that spares registers.
  __device__ void post_rows() {
    Chain const& chain = state_.chain;
    for (int i = 0; i < kWarp; ++i) {
      for (int member = 0; member < params_.group; ++member) {
        auto const& [row, flags_of_row] = state_.rows[i];
        int flags = flags_of_row;
        if (member > 0) flags &= ~kFirstOfChain;
        if (member < params_.group - 1) flags &= ~kLastOfChain;
        int const head = chain.kv_head * params_.group + member;
        int const heads_before = chain.batch * params_.problem.heads + head;
        post({.dq_tile = heads_before * params_.q_tiles + row.q_tile,
              .turn = row.turn,
              .flags = flags,
              .q_tile = row.q_tile,
              .kv_tile = chain.kv_tile,
              .kv_head = chain.kv_head,
              .batch = chain.batch,
              .head = head});
      }
      if (state_.rows[i].flags & kLastOfChain) return;
    }
  }

  __device__ void post(StepDescriptor const& step) {
    uint32_t const count = state_.posted++;
    int const slot = slot_of<Config::kPlannedSteps>(count);
    uint32_t const parity = parity_of<Config::kPlannedSteps>(count) ^ 1;
    mbarrier_wait(smem_.plan_empty[slot], parity, "plan_empty");
    smem_.plan[slot] = step;
    mbarrier_arrive(smem_.plan_full[slot]);
  }

  __device__ static bool first_lane() { return threadIdx.x % kWarp == 0; }

  Storage& smem_;
  PlannerState& state_;
  MainParams const& params_;
  AnySchedule schedule_;
};

}  // namespace dash
