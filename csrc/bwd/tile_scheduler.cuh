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

#include <type_traits>

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

  __device__ void run(int cta, int ctas) {
    if (first_lane()) {
      state_.ctas = ctas;
      state_.ticket = -1;
      state_.end_of_circle = 0;
      state_.posted = 0;
      begin_call(cta);
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
      uint32_t const count = state_.posted + w;
      wait_for_slot(count).step.flags = kEndOfWork;
      mbarrier_arrive(smem_.plan_full[slot_of<Config::kPlannedSteps>(count)]);
    }
  }

 private:
  // A dense call is one sequence of a batch; a packed one begins without.
  __device__ void begin_call(int cta) {
    ScheduledSequence& s = state_.sequence;
    s.problem = params_.problem;
    s.strategy = params_.strategy;
    s.first_ticket = 0;
    s.q_row = s.k_row = s.q_slab = s.k_slab = 0;
    s.k_start = s.q_tile = s.kv_tile = 0;
    state_.place = -1;
    if (params_.squad_size > 1)
      state_.member = join_squad(params_.dealer, params_.squad_size, cta, state_.ctas);
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
    while (state_.step < state_.num_steps) {
      plan_steps();
      __syncwarp();
      if (first_lane()) {
        state_.posted += smaller(state_.num_steps - state_.step, kWarp);
        state_.step += kWarp;
      }
      __syncwarp();
    }
  }

  __device__ Problem problem_here() const { return with_tiles<Config>(state_.sequence.problem); }

  // What is the same for all steps of a chain is asked once and kept where all lanes see it.
  __device__ void ask_for_chain() {
    __syncwarp();  // all lanes have read what the first one overwrites
    if (first_lane()) {
      Ticket const ticket = state_.ticket - state_.sequence.first_ticket;
      visit_schedule(state_.sequence.strategy, problem_here(), [&](auto const& s) {
        state_.chain = s.chain(ticket, state_.leg);
        // The rest reads the problem anew: chain() of some takes all registers.
        asm volatile("" ::: "memory");
        auto const same = std::remove_cvref_t<decltype(s)>{problem_here()};
        state_.num_steps = same.num_visits(state_.chain);
        state_.num_legs = same.num_legs(ticket);
        state_.end_of_circle =
            state_.sequence.first_ticket + same.end_of_circle(ticket, state_.chain);
      });
      state_.heads_of_chain = problem_here().heads_of_chain();
      state_.num_steps *= state_.heads_of_chain;
      ++state_.leg;
      state_.step = 0;
    }
    __syncwarp();
  }

  // A step a lane: one for each head of the chain, heads innermost.
  __device__ void plan_steps() {
    int const mine = state_.step + lane();
    int const members = state_.heads_of_chain;
    int const position = members == 1 ? mine : mine / members;
    Visit visit{};
    if (mine < state_.num_steps) {
      Problem const problem = problem_here();
      visit = visit_schedule(state_.sequence.strategy, problem,
                             [&](auto const& s) { return s.visit(state_.chain, position); });
    }
    // Half of the slots at a time, so that the loader finds steps in the other half meanwhile.
    constexpr int kTogether = Config::kPlannedSteps / 2;
    int const planned = smaller(state_.num_steps - state_.step, kWarp);
#pragma unroll 1
    for (int first = 0; first < planned; first += kTogether) {
      // Slots are freed in order: who waits for the last of these waits for all.
      int const last = smaller(first + kTogether, planned) - 1;
      if (lane() == last) wait_for_slot(state_.posted + last);
      __syncwarp();
      if (lane() >= first && lane() <= last) post(visit, mine - position * members);
      __syncwarp();
    }
  }

  __device__ void post(Visit const& visit, int member) {
    ScheduledSequence const& s = state_.sequence;
    Chain const& chain = state_.chain;
    PlannedStep& planned = smem_.plan[my_slot()];
    StepDescriptor& step = planned.step;

    StepMask const mask = step_mask(problem_here(), visit.q_tile, chain.kv_tile);
    int const mine = state_.step + lane();
    int flags = 0;
    if (mask.hides_right) flags |= kHidesRight;
    if (mask.hides_left) flags |= kHidesLeft;
    if (mine == 0) flags |= kFirstOfChain;
    if (mine == state_.num_steps - 1) flags |= kLastOfChain;
    int const keyless_rows = s.problem.keyless_rows() - visit.q_tile * Config::kTileQ;
    if (keyless_rows > 0) flags |= kKeylessRows;
    planned.keyless_rows = keyless_rows;
    step.flags = flags;
    step.turn = visit.turn;
    step.columns = mask.columns;
    step.first_row = mask.first_row;
    step.last_row = mask.last_row;
    int const head = chain.kv_slice * state_.heads_of_chain + member;
    step.dq_tile =
        (chain.batch * s.problem.heads + head) * params_.dq_tiles_of_head + s.q_tile + visit.q_tile;
    planned.q_row = s.q_row + visit.q_tile * Config::kTileQ;
    planned.q_slab = s.q_slab + chain.batch;
    planned.head = head;
    describe_kv(planned);
    mbarrier_arrive(smem_.plan_full[my_slot()]);
  }

  __device__ int my_slot() const { return slot_of<Config::kPlannedSteps>(state_.posted + lane()); }

  // Where the step's KV tile lies: for the loads and the stores of a chain.
  __device__ void describe_kv(PlannedStep& planned) {
    ScheduledSequence const& s = state_.sequence;
    Chain const& chain = state_.chain;
    StepDescriptor& step = planned.step;
    int const row = chain.kv_tile * Config::kTileKv;
    int const split = s.problem.group_split;
    step.kv_row = s.k_start + row;
    step.batch = chain.batch;
    step.kv_head = planned.kv_head = split == 1 ? chain.kv_slice : chain.kv_slice / split;
    step.parts_tile = split == 1 ? -1
                                 : (chain.batch * s.problem.kv_slices() + chain.kv_slice) *
                                           params_.kv_tiles_of_head +
                                       s.kv_tile + chain.kv_tile;
    planned.k_row = s.k_row + row;
    planned.k_slab = s.k_slab + chain.batch;
  }

  __device__ PlannedStep& wait_for_slot(uint32_t count) {
    int const slot = slot_of<Config::kPlannedSteps>(count);
    mbarrier_wait(smem_.plan_empty[slot], parity_of<Config::kPlannedSteps>(count) ^ 1,
                  "plan_empty");
    return smem_.plan[slot];
  }

  __device__ void wait_until_read(uint32_t step) {
    mbarrier_wait(smem_.plan_empty[slot_of<Config::kPlannedSteps>(step)],
                  parity_of<Config::kPlannedSteps>(step), "plan_empty of the last step");
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
