// The MMA warpgroups: one step is five products and the pointwise work between them.
//
// What one warpgroup keeps the tensor core busy with, and what its registers do meanwhile (the
// other warpgroup fills the gaps):
//
//   tensor core  dK(i-1) ── S(i) ── dQ(i-1) │              │ dP(i) ── dV(i)   │ dK(i) ── …
//   registers                │ exp2, mask, P(i) │ stage dQ(i-1) │        │ dS(i) │
//
// dQ of a step is begun a step late, behind the next S: it keeps the tensor core busy during the
// next step's exp2, and the warpgroups, which need each other's dS for dQ, need not keep in step.
// Two buffers of dS suffice: to write one again a warpgroup must have seen the next step's ds_full,
// and before that the other one waited for its dQ.
//
// With a 128-row q tile there are no registers to carry dS(i) over, and step i waits for dK(i).
#pragma once

#include "step_products.cuh"

namespace dash {

template <typename Element, typename Config>
class MmaWarpgroup : StepProducts<Element, Config> {
  using Base = StepProducts<Element, Config>;
  using typename Base::P;
  using typename Base::Storage;

 public:
  __device__ MmaWarpgroup(Storage& smem, MainParams const& params, int thread)
      : Base(smem, params, thread) {}

  __device__ __forceinline__ void run() {
    int flags = receive_step();
    while (!(flags & kEndOfWork)) {
      clear_kv();
      step</*kFirst=*/true>(flags);
      while (!(flags & kLastOfChain)) {
        flags = step</*kFirst=*/false>(flags);
      }
      end_chain();
      flags = receive_step();
    }
  }

 private:
  using Base::chains_, Base::count_, Base::ds_, Base::params_, Base::smem_, Base::thread_;
  using Base::clear_kv, Base::fence_dk, Base::fence_dv, Base::first_column, Base::forget_addresses;
  using Base::hand_over_dq, Base::hide_left, Base::hide_right, Base::issue_dk, Base::issue_dv;
  using Base::issue_last_dq, Base::issue_output_scores, Base::issue_scores, Base::k_slot;
  using Base::kv_row, Base::receive_step, Base::stage_dq, Base::store_dk, Base::store_dv;

  // Before and after: nothing in flight; dS of the last step in shared memory and in ds_, dQ of it
  // not begun, nor dK where it is late (no last step in the first of a chain, whose flags are known
  // already). Returns the step's flags.
  template <bool kFirst>
  __device__ __forceinline__ int step(int flags) {
    using namespace cute;
    forget_addresses();
    if constexpr (!kFirst) {
      if constexpr (Config::kLateDk) issue_last_dk();
      flags = receive_step();
    }
    int const stage = slot_of<Config::kStages>(count_);
    // Local, so that each step's are new to the compiler: a product reads its accumulators, and as
    // members they would all stay alive from step to step.
    float s[P::kScoreFragment], dp[P::kScoreFragment], dq[P::kDqFragment];
    float lse_log2[P::kScoreFragment / 2];

    // Loads go out before the products: behind them they would wait for the tensor core to take
    // those.
    load_columns(lse_log2, &smem_.lse_log2[stage][first_column()]);
    if constexpr (kFirst)
      mbarrier_wait(smem_.k_full[k_slot()], parity_of<Config::kKSlots>(chains_), "k_full");
    issue_scores(s, stage);
    if constexpr (!kFirst) {
      if constexpr (Config::kLateDk) {
        wgmma_wait<1>();  // dK
        fence_dk();
        fence_dv();
        arrive_once_per_warp(smem_.q_empty[slot_of<Config::kStages>(count_ - 1)]);
      }
      issue_last_dq(dq);
    }
    wgmma_wait<kFirst ? 0 : 1>();  // S
    auto S = make_tensor(&s[0], P::score_layout());
    wgmma_fence(S);
    probabilities(s, lse_log2, params_.scale_log2);
    if (flags & (kHidesRight | kHidesLeft)) {
      if (flags & kHidesRight) hide_right(s, smem_.steps[stage]);
      if (flags & kHidesLeft) hide_left(s, smem_.steps[stage]);
    }
    uint32_t p[P::kScoreFragment / 2];
    to_operand<Element>(p, s);

    forget_addresses();
    mbarrier_wait(smem_.dout_full[stage], parity_of<Config::kStages>(count_), "dout_full");
    if constexpr (!kFirst) {
      wgmma_wait<0>();
      stage_dq(dq);
    }
    if constexpr (kFirst) mbarrier_wait(smem_.v_full, chains_ & 1, "v_full");
    set_columns(dp, &smem_.minus_delta[stage][first_column()]);
    issue_output_scores(dp, stage);
    issue_dv(p, stage);
    if constexpr (!kFirst) hand_over_dq();

    wgmma_wait<1>();  // dP
    auto dP = make_tensor(&dp[0], P::score_layout());
    wgmma_fence(dP);
    if (flags & kLastOfChain) arrive_once_per_warp(smem_.v_empty);
    score_gradients(dp, s);
    to_operand<Element>(ds_, dp);
    store_ds<Config>(&smem_.ds[slot_of<Config::kDsStages>(count_)][0], ds_, kv_row());
    fence_proxy_async_shared();
    arrive_once_per_warp(smem_.ds_full[slot_of<Config::kDsStages>(count_)]);
    if constexpr (!Config::kLateDk) issue_dk(ds_, stage);
    wgmma_wait<0>();  // dV, and dK where it is not late
    fence_dk();
    fence_dv();
    arrive_once_per_warp(smem_.dout_empty[stage]);
    if (!Config::kLateDk && !(flags & kLastOfChain))
      arrive_once_per_warp(smem_.q_empty[stage]);  // else end_chain() still reads the descriptor
    ++count_;
    return flags;
  }

  __device__ __forceinline__ void end_chain() {
    StepDescriptor const step = smem_.steps[slot_of<Config::kStages>(count_ - 1)];
    float dq[P::kDqFragment];
    if constexpr (Config::kLateDk) issue_last_dk();
    issue_last_dq(dq);
    // Both before dQ is staged, because its stage is still being read: with nothing to do in
    // between, its release would be waited for. dV under the products, dK behind them.
    store_dv(step);
    wgmma_wait<0>();
    fence_dk();
    arrive_once_per_warp(smem_.k_empty[k_slot()]);
    ++chains_;
    arrive_once_per_warp(smem_.q_empty[slot_of<Config::kStages>(count_ - 1)]);
    store_dk(step);
    stage_dq(dq);
    hand_over_dq();
  }

  // dK of the last step: opening the next one, it bridges the wait for Q and the way to S.
  __device__ __forceinline__ void issue_last_dk() {
    issue_dk(ds_, slot_of<Config::kStages>(count_ - 1));
  }
};

}  // namespace dash
