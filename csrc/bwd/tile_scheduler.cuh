// The persistent tile scheduler: one warp that takes tickets, finds their sequence, asks its
// schedule, and writes step descriptors. The only code of the kernel that knows a strategy. A warp
// of its own, so that the schedule's state costs no other role a register and its divisions no load
// a delay.
//
// Schedules (csrc/schedule) are policies: which ticket is which chain, which visits that has, in
// which turns. The dealer (dealer.cuh) decides who gets a ticket when. A visit is up to nine
// divisions, 2,500 cycles for a lone thread, and a step of the MMA warpgroups takes 3,400. So each
// lane asks for a visit of its own, and the first lane posts them.
#pragma once

#include "dealer.cuh"
#include "sequence_table.cuh"
#include "shared_storage.h"

namespace dash {

template <typename Element, typename Config>
class TileScheduler {
 public:
  using Storage = SharedStorage<Element, Config>;

  __device__ TileScheduler(Storage& smem, MainParams const& params)
      : smem_(smem), state_(smem.scheduler), params_(params) {}

  __device__ void run(int ctas) {
    if (first_lane()) {
      state_.ctas = ctas;
      state_.ticket = -1;
      state_.end_of_circle = 0;
      state_.posted = 0;
      begin_call();
    }
    while (take_ticket()) {
      if (params_.is_packed()) find_sequence();
      do {
        plan_chain();
      } while (state_.leg < state_.num_legs);
    }
    if (!first_lane()) return;
    // The MMA warpgroups stop at the first end; every dQ writer needs one in a stage of its own.
    for (int w = 0; w < Config::kDqWriters; ++w) {
      PlannedStep& planned = next_slot();
      planned.step.flags = kEndOfWork;
      hand_over();
    }
  }

 private:
  // A dense call is one sequence of a batch; a packed one begins without.
  __device__ void begin_call() {
    ScheduledSequence& s = state_.sequence;
    s.problem = params_.problem;
    s.strategy = params_.strategy;
    s.first_ticket = 0;
    s.q_row = s.k_row = s.q_slab = s.k_slab = 0;
    s.k_start = s.q_tile = s.kv_tile = 0;
    state_.place = -1;
    if (params_.squad_size > 1) state_.member = join_squad(params_.dealer, params_.squad_size);
    state_.num_tickets = params_.is_packed() ? *params_.table.num_tickets : params_.num_tickets;
  }

  // The next ticket is taken while the last chain drains; one of the last round not before the
  // loader has all steps of that chain. Taken early, it may be one more than the CTA's share, while
  // others have ended.
  __device__ bool take_ticket() {
    __syncwarp();
    if (first_lane()) {
      if (state_.posted > 0 && state_.ticket >= state_.num_tickets - state_.ctas)
        wait_until_read(state_.posted - 1);
      if (params_.is_packed())
        state_.ticket = deal_ticket(params_.dealer.next, state_.ticket, state_.end_of_circle);
      else if (params_.squad_size == 1)
        state_.ticket = atomicAdd(params_.dealer.next, 1);
      else
        take_circle();
      state_.leg = 0;
    }
    __syncwarp();
    return state_.ticket < state_.num_tickets;
  }

  // A circle may have fewer tickets than the squad has members: then some have none of it.
  __device__ void take_circle() {
    for (;;) {
      int const circle =
          deal_circle(params_.dealer, state_.member, params_.squad_size, params_.num_circles);
      if (circle == params_.num_circles) {
        state_.ticket = state_.num_tickets;
        return;
      }
      bool const mine =
          visit_schedule(state_.sequence.strategy, problem_here(), [&](auto const& s) {
            Ticket const first = s.first_of_circle(circle);
            state_.ticket = first + state_.member.member;
            return state_.ticket < s.end_of_circle(first, s.chain(first, 0));
          });
      if (mine) return;
    }
  }

  __device__ void find_sequence() {
    Ticket const ticket = state_.ticket;
    int const* const first_tickets = params_.table.first_tickets;
    int const place =
        find_last(params_.packed.batch, [&](int index) { return first_tickets[index] <= ticket; });
    if (place == state_.place) return;
    __syncwarp();
    if (first_lane()) {
      state_.place = place;
      begin_sequence(params_.table.records[place], first_tickets[place]);
    }
    __syncwarp();
  }

  __device__ void begin_sequence(SequenceRecord const& r, Ticket first_ticket) {
    ScheduledSequence& s = state_.sequence;
    s.problem = problem_of(params_.problem, r.seqlen_q, r.seqlen_k, r.group_split);
    s.strategy = r.strategy;
    s.first_ticket = first_ticket;
    s.q_row = kPackedRows - r.seqlen_q;
    s.k_row = kPackedRows - r.seqlen_k;
    s.q_slab = r.q_start + r.seqlen_q;
    s.k_slab = r.k_start + r.seqlen_k;
    s.k_start = r.k_start;
    s.q_tile = r.q_tile;
    s.kv_tile = r.kv_tile;
  }

  __device__ void plan_chain() {
    ask_for_chain();
    while (state_.position < state_.num_visits) {
      ask_for_visits();
      __syncwarp();
      if (first_lane()) {
        post_visits(smaller(state_.num_visits - state_.position, kWarp));
        state_.position += kWarp;
      }
      __syncwarp();
    }
  }

  __device__ Problem problem_here() const { return with_tiles<Config>(state_.sequence.problem); }

  // What is the same for all visits of a chain is asked once and kept where all lanes see it.
  __device__ void ask_for_chain() {
    __syncwarp();  // all lanes have read what the first one overwrites
    if (first_lane()) {
      Ticket const first_ticket = state_.sequence.first_ticket;
      visit_schedule(state_.sequence.strategy, problem_here(), [&](auto const& s) {
        Ticket const ticket = state_.ticket - first_ticket;
        Chain const chain = s.chain(ticket, state_.leg);
        state_.chain = chain;
        state_.num_visits = s.num_visits(chain);
        state_.num_legs = s.num_legs(ticket);
        state_.end_of_circle = first_ticket + s.end_of_circle(ticket, chain);
      });
      ++state_.leg;
      state_.position = 0;
    }
    __syncwarp();
  }

  __device__ void ask_for_visits() {
    int const mine = state_.position + lane();
    if (mine >= state_.num_visits) return;
    Problem const problem = problem_here();
    Visit const visit = visit_schedule(state_.sequence.strategy, problem,
                                       [&](auto const& s) { return s.visit(state_.chain, mine); });
    StepMask const mask = step_mask(problem, visit.q_tile, state_.chain.kv_tile);
    int flags = 0;
    if (mask.hides_right) flags |= kHidesRight;
    if (mask.hides_left) flags |= kHidesLeft;
    if (mine == 0) flags |= kFirstOfChain;
    if (mine == state_.num_visits - 1) flags |= kLastOfChain;
    state_.visits[lane()] = {visit, flags, mask.first_row, mask.last_row};
  }

  // One step for each head of the chain, heads innermost. What a step needs is read from shared
  // memory anew, because it has passed a barrier: that spares registers.
  __device__ void post_visits(int count) {
    ScheduledSequence const& s = state_.sequence;
    Problem const& p = s.problem;
    Chain const& chain = state_.chain;
    int const members = p.heads_of_chain();
    for (int i = 0; i < count; ++i) {
      for (int member = 0; member < members; ++member) {
        PlannedStep& planned = next_slot();
        StepDescriptor& step = planned.step;
        auto const& visit = state_.visits[i];
        int const q_tile = visit.visit.q_tile;
        int const head = chain.kv_slice * members + member;
        int flags = visit.flags;
        if (member > 0) flags &= ~kFirstOfChain;
        if (member < members - 1) flags &= ~kLastOfChain;
        step.flags = flags;
        step.turn = visit.visit.turn;
        step.first_row = visit.first_row;
        step.last_row = visit.last_row;
        step.dq_tile =
            (chain.batch * p.heads + head) * params_.dq_tiles_of_head + s.q_tile + q_tile;
        step.keyless_rows = p.keyless_rows() - q_tile * Config::kTileQ;
        planned.q_row = s.q_row + q_tile * Config::kTileQ;
        planned.q_slab = s.q_slab + chain.batch;
        planned.head = head;
        if (flags & (kFirstOfChain | kLastOfChain | kHidesRight)) describe_kv(planned);
        hand_over();
      }
    }
  }

  // What a step needs to know of its KV tile; loads, masks and stores ask on some steps only.
  __device__ void describe_kv(PlannedStep& planned) {
    ScheduledSequence const& s = state_.sequence;
    Chain const& chain = state_.chain;
    StepDescriptor& step = planned.step;
    int const row = chain.kv_tile * Config::kTileKv;
    int const split = s.problem.group_split;
    step.columns = s.problem.seqlen_k - row;
    step.kv_row = s.k_start + row;
    step.batch = chain.batch;
    step.kv_head = planned.kv_head = chain.kv_slice / split;
    step.parts_tile = split == 1 ? -1
                                 : (chain.batch * s.problem.kv_slices() + chain.kv_slice) *
                                           params_.kv_tiles_of_head +
                                       s.kv_tile + chain.kv_tile;
    planned.k_row = s.k_row + row;
    planned.k_slab = s.k_slab + chain.batch;
  }

  __device__ PlannedStep& next_slot() {
    uint32_t const count = state_.posted;
    int const slot = slot_of<Config::kPlannedSteps>(count);
    uint32_t const parity = parity_of<Config::kPlannedSteps>(count) ^ 1;
    mbarrier_wait(smem_.plan_empty[slot], parity, "plan_empty");
    return smem_.plan[slot];
  }

  __device__ void wait_until_read(uint32_t step) {
    mbarrier_wait(smem_.plan_empty[slot_of<Config::kPlannedSteps>(step)],
                  parity_of<Config::kPlannedSteps>(step), "plan_empty of the last step");
  }

  __device__ void hand_over() {
    mbarrier_arrive(smem_.plan_full[slot_of<Config::kPlannedSteps>(state_.posted++)]);
  }

  // Read anew each time: kept, it is a register that is not there.
  __device__ static int lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  __device__ static bool first_lane() { return lane() == 0; }

  Storage& smem_;
  SchedulerState& state_;
  MainParams const& params_;
};

}  // namespace dash
