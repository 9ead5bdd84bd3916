// The MMA warpgroups where dK and dV take 160 of a thread's 240 registers (head dims 192:128).
//
// Accumulators begin at the 24th register (ptxas), so 56 are left for those of a step: S, then dP,
// then dQ, never two of them. So P is kept in 16 bit alone, and every product of a step is in it:
//
//   tensor core  S(i) │              │ dP(i) ── dV(i)   │ dK(i) ── dQ(i) │          │ S(i+1) ── …
//   registers         │ exp2, mask, P(i)  │      │ dS(i) │                │ stage dQ(i)
//
// The other warpgroup fills the gaps: a warpgroup's own products are half of a step. It may be
// ahead by as much as dK takes before it waits for the other's dS.
//
// lse has no registers beside S: S starts from −lse / softmax_scale, so P = 2^(S · scale_log2).
#pragma once

#include "step_products.cuh"

namespace dash {

template <typename Element, typename Config>
class WideMmaWarpgroup : StepProducts<Element, Config> {
  using Base = StepProducts<Element, Config>;
  using typename Base::P;
  using typename Base::Storage;
  static_assert(Config::kScoresFromLse && Config::kDsStages == 1);

 public:
  __device__ WideMmaWarpgroup(Storage& smem, MainParams const& params, int thread)
      : Base(smem, params, thread) {}

  __device__ __forceinline__ void run() {
    int flags = receive_step();
    while (!(flags & kEndOfWork)) {
      if (flags & kFirstOfChain) {
        clear_kv();
        mbarrier_wait(smem_.k_full[k_slot()], parity_of<Config::kKSlots>(chains_), "k_full");
        mbarrier_wait(smem_.v_full, chains_ & 1, "v_full");
      }
      step(flags);
      if (flags & kLastOfChain) end_chain();
      flags = receive_step();
    }
  }

 private:
  using Base::chains_, Base::count_, Base::params_, Base::smem_;
  using Base::clear_kv, Base::fence_dk, Base::fence_dv, Base::first_column, Base::forget_addresses;
  using Base::hand_over_dq, Base::hide_left, Base::hide_right, Base::issue_dk, Base::issue_dv;
  using Base::issue_last_dq, Base::issue_output_scores, Base::issue_scores, Base::k_slot;
  using Base::kv_row, Base::receive_step, Base::stage_dq, Base::store_dk, Base::store_dv;

  // Before and after: nothing in flight, nothing kept but dK and dV.
  __device__ __forceinline__ void step(int flags) {
    using namespace cute;
    forget_addresses();
    int const stage = slot_of<Config::kStages>(count_);
    float s[P::kScoreFragment], dp[P::kScoreFragment], dq[P::kDqFragment];
    uint32_t p[P::kScoreFragment / 2], ds[P::kScoreFragment / 2];
    set_columns(s, &smem_.lse_log2[stage][first_column()]);
    issue_scores</*kFromAccumulator=*/true>(s, stage);
    mbarrier_wait(smem_.dout_full[stage], parity_of<Config::kStages>(count_), "dout_full");
    wgmma_wait<0>();  // S
    auto S = make_tensor(&s[0], P::score_layout());
    wgmma_fence(S);
    probabilities(s, params_.scale_log2);
    if (flags & (kHidesRight | kHidesLeft)) {
      if (flags & kHidesRight) hide_right(s, smem_.steps[stage]);
      if (flags & kHidesLeft) hide_left(s, smem_.steps[stage]);
    }
    to_operand<Element>(p, s);

    forget_addresses();
    set_columns(dp, &smem_.minus_delta[stage][first_column()]);
    issue_output_scores(dp, stage);
    issue_dv(p, stage);
    wgmma_wait<1>();  // dP
    auto dP = make_tensor(&dp[0], P::score_layout());
    wgmma_fence(dP);
    if (flags & kLastOfChain) arrive_once_per_warp(smem_.v_empty);
    score_gradients<Element>(dp, p);
    to_operand<Element>(ds, dp);
    // The one slot of dS is free when both warpgroups' last dQ is done.
    if (count_ > 0) mbarrier_wait(smem_.ds_empty, parity_of<1>(count_ - 1), "ds_empty");
    store_ds<Config>(&smem_.ds[0][0], ds, kv_row());
    fence_proxy_async_shared();
    arrive_once_per_warp(smem_.ds_full[0]);
    ++count_;
    issue_dk(ds, stage);
    wgmma_wait<0>();  // dV, dK: dQ takes the registers of their operands
    fence_dv();
    fence_dk();
    arrive_once_per_warp(smem_.dout_empty[stage]);
    if (!(flags & kLastOfChain)) arrive_once_per_warp(smem_.q_empty[stage]);
    issue_last_dq(dq);
    wgmma_wait<0>();  // dQ
    arrive_once_per_warp(smem_.ds_empty);
    stage_dq(dq);
    hand_over_dq();
  }

  __device__ __forceinline__ void end_chain() {
    int const stage = slot_of<Config::kStages>(count_ - 1);
    arrive_once_per_warp(smem_.k_empty[k_slot()]);
    ++chains_;
    StepDescriptor const step = smem_.steps[stage];
    arrive_once_per_warp(smem_.q_empty[stage]);
    store_dv(step);
    store_dk(step);
  }
};

}  // namespace dash
