// The MMA warpgroups: one step is five products and the pointwise work between them.
//
// What one warpgroup keeps the tensor core busy with, and what its registers do meanwhile (the
// other warpgroup fills the gaps):
//
//   tensor core  dK(i-1) ── S(i) ── dQ(i-1) │              │ dP(i) ── dV(i)   │ dK(i) ── …
//   registers                │ exp2, mask, P(i) │ stage dQ(i-1) │        │ dS(i) │
//
// With a 128-row q tile there are no registers to carry dS(i) over, and step i waits for dK(i).
#pragma once

#include "../sm90/bulk_reduce.cuh"
#include "../sm90/wgmma.cuh"
#include "barriers.h"
#include "dq_fragment.cuh"
#include "epilogue.cuh"
#include "fragment_order.cuh"
#include "products.cuh"
#include "shared_storage.h"
#include "softmax_grad.cuh"

namespace dash {

__device__ __forceinline__ void arrive_once_per_warp(Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) mbarrier_arrive(barrier);
}

// Stores this warp's 16 rows (kv) of dS^T into the swizzled (q, kv) tile. Matrix m = lane / 8 of
// the four that one stmatrix writes is (columns 8(g + m/2), rows + 8(m % 2)), in fragment order.
template <typename Config>
__device__ __forceinline__ void store_ds(void* tile, uint32_t const (&ds)[Config::kTileQ / 4],
                                         int kv_row) {
  constexpr int kBlocks = Config::kTileQ / 64;  // of 64 q rows: 128 bytes, the swizzle's width
  int const lane = threadIdx.x % kWarp;
  int const row_in_eight = lane % 8;
  int const eight_rows = kv_row / 8 + (lane / 8) % 2;
  uint32_t const row_address =
      shared_address(tile) + eight_rows * (1024 * kBlocks) + row_in_eight * 128;
#pragma unroll
  for (int i = 0; i < Config::kTileQ / 16; ++i) {
    int const block = i / 4;
    int const chunk = 2 * (i % 4) + lane / 16;
    uint32_t const address = row_address + block * 1024 + ((chunk ^ row_in_eight) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(ds[4 * i]), "r"(ds[4 * i + 1]), "r"(ds[4 * i + 2]), "r"(ds[4 * i + 3])
                 : "memory");
  }
}

template <typename Element, typename Config>
class MmaWarpgroup {
 public:
  using Storage = SharedStorage<Element, Config>;
  using P = Products<Element, Config>;

  __device__ MmaWarpgroup(Storage& smem, MainParams const& params, int thread)
      : smem_(smem),
        params_(params),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffff, thread / kWarpgroup, 0)) {}

  __device__ __forceinline__ void run() {
    int flags = receive_step();
    while (!(flags & kEndOfWork)) {
      // Cleared, not overwritten by the first product: as long as dK and dV are alive everywhere,
      // the two copies of step() agree on registers. Otherwise ptxas moves them about, spills and
      // serialises.
#pragma unroll
      for (int i = 0; i < P::kKvFragment; ++i) dk_[i] = dv_[i] = 0.f;
      step</*kFirst=*/true>(flags);
      while (!(flags & kLastOfChain)) {
        flags = step</*kFirst=*/false>(flags);
      }
      end_chain();
      flags = receive_step();
    }
  }

 private:
  __device__ __forceinline__ int receive_step() {
    mbarrier_wait(smem_.q_full[slot_of<Config::kStages>(count_)],
                  parity_of<Config::kStages>(count_), "q_full");
    return smem_.steps[slot_of<Config::kStages>(count_)].flags;
  }

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
        fence_kv();
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
    issue_kv(dv_, p, smem_.dout, stage);
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
    if constexpr (!Config::kLateDk) issue_kv(dk_, ds_, smem_.q, stage);
    wgmma_wait<0>();  // dV, and dK where it is not late
    fence_kv();
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
    store_kv_gradient<Element, Config>(dv_, 1.f, params_.dv, params_.dv_parts, params_.head_dim,
                                       step, thread_);
    wgmma_wait<0>();
    auto dK = cute::make_tensor(&dk_[0], P::kv_layout());
    wgmma_fence(dK);
    arrive_once_per_warp(smem_.k_empty[k_slot()]);
    ++chains_;
    arrive_once_per_warp(smem_.q_empty[slot_of<Config::kStages>(count_ - 1)]);
    store_kv_gradient<Element, Config>(dk_, params_.softmax_scale, params_.dk, params_.dk_parts,
                                       params_.head_dim, step, thread_);
    stage_dq(dq);
    hand_over_dq();
  }

  // dQ of the last step is begun a step late, behind the next S: it keeps the tensor core busy
  // during the next step's exp2, and the warpgroups, which need each other's dS for dQ, need not
  // keep in step. Two buffers of dS suffice: to write one again a warpgroup must have seen the next
  // step's ds_full, and before that the other one waited for its dQ.
  __device__ __forceinline__ void issue_last_dq(float (&dq)[P::kDqFragment]) {
    uint32_t const last = count_ - 1;
    mbarrier_wait(smem_.ds_full[slot_of<Config::kDsStages>(last)],
                  parity_of<Config::kDsStages>(last), "ds_full");
    issue_dq(dq, slot_of<Config::kDsStages>(last));
  }

  // dK of the last step: opening the next one, it bridges the wait for Q and the way to S.
  __device__ __forceinline__ void issue_last_dk() {
    issue_kv(dk_, ds_, smem_.q, slot_of<Config::kStages>(count_ - 1));
  }

  // The last step's dQ, after the wait for it, goes to the staging buffer, which the one before it
  // must have left. In fragment order: the sums are private, so a thread's floats stay together.
  __device__ __forceinline__ void stage_dq(float (&dq)[P::kDqFragment]) {
    auto dQ = cute::make_tensor(&dq[0], P::dq_layout());
    wgmma_fence(dQ);
    if (count_ >= 2)
      mbarrier_wait(smem_.dq_empty[slot_of<Config::kDqWriters>(count_ - 2)],
                    parity_of<Config::kDqWriters>(count_ - 2), "dq_empty");
    keep_fragment<DqFragment<Config>>(reinterpret_cast<float4*>(smem_.dq), dq, thread_);
  }

  __device__ __forceinline__ void hand_over_dq() {
    fence_proxy_async_shared();
    arrive_once_per_warp(smem_.dq_full[slot_of<Config::kDqWriters>(count_ - 1)]);
  }

  // S^T = K Q^T
  __device__ __forceinline__ void issue_scores(float (&s)[P::kScoreFragment], int stage) {
    using namespace cute;
    auto const mma = scores_mma().get_slice(warpgroup_ * kWarpgroup);
    auto const sK = make_tensor(make_smem_ptr(smem_.k[k_slot()]), typename P::KvLayout{});
    auto const sQ = make_tensor(make_smem_ptr(&smem_.q[0][0]), typename P::QLayout{});
    auto S = make_tensor(&s[0], P::score_layout());
    clear(S);
    wgmma_begin();
    wgmma_issue(scores_mma(), mma.partition_fragment_A(sK),
                mma.partition_fragment_B(sQ)(_, _, _, stage), S, false);
  }

  // dP^T − delta = V dO^T − delta: dp holds −delta
  __device__ __forceinline__ void issue_output_scores(float (&dp)[P::kScoreFragment], int stage) {
    using namespace cute;
    auto const mma = scores_mma().get_slice(warpgroup_ * kWarpgroup);
    auto const sV = make_tensor(make_smem_ptr(smem_.v), typename P::KvLayout{});
    auto const sdO = make_tensor(make_smem_ptr(&smem_.dout[0][0]), typename P::QLayout{});
    auto dP = make_tensor(&dp[0], P::score_layout());
    wgmma_fence(dP);
    wgmma_begin();
    wgmma_issue(scores_mma(), mma.partition_fragment_A(sV),
                mma.partition_fragment_B(sdO)(_, _, _, stage), dP, true);
  }

  // dV += P^T dO and dK += dS^T Q
  template <int kPacked, int kStages, int kElements>
  __device__ __forceinline__ void issue_kv(float (&gradient)[P::kKvFragment],
                                           uint32_t (&packed)[kPacked],
                                           Element (&tiles)[kStages][kElements], int stage) {
    using namespace cute;
    typename P::KvGradients tiled_mma;
    auto const mma = tiled_mma.get_slice(warpgroup_ * kWarpgroup);
    auto const transposed = make_tensor(make_smem_ptr(&tiles[0][0]), typename P::QTransposed{});
    auto const a = make_tensor(reinterpret_cast<Element*>(&packed[0]), P::operand_layout());
    auto acc = make_tensor(&gradient[0], P::kv_layout());
    wgmma_fence(acc);
    wgmma_begin();
    wgmma_issue(tiled_mma, a, mma.partition_fragment_B(transposed)(_, _, _, stage), acc, true);
  }

  // dQ = dS K
  __device__ __forceinline__ void issue_dq(float (&dq)[P::kDqFragment], int ds_stage) {
    using namespace cute;
    typename P::QGradients tiled_mma;
    auto const mma = tiled_mma.get_slice(warpgroup_ * kWarpgroup);
    auto const sdS = make_tensor(make_smem_ptr(&smem_.ds[0][0]), typename P::DsLayout{});
    auto const sKt = make_tensor(make_smem_ptr(smem_.k[k_slot()]), typename P::KvTransposed{});
    auto dQ = make_tensor(&dq[0], P::dq_layout());
    clear(dQ);
    wgmma_begin();
    wgmma_issue(tiled_mma, mma.partition_fragment_A(sdS)(_, _, _, ds_stage),
                mma.partition_fragment_B(sKt), dQ, false);
  }

  __device__ __forceinline__ void hide_right(float (&s)[P::kScoreFragment],
                                             StepDescriptor const& step) {
    int const column = first_kv_row();
    StepMask const mask{.columns = step.columns, .first_row = step.first_row};
    hide_before(s, first_visible_row(mask, column, Config::kTileQ) - first_column(),
                first_visible_row(mask, column + 8, Config::kTileQ) - first_column());
  }

  __device__ __forceinline__ void hide_left(float (&s)[P::kScoreFragment],
                                            StepDescriptor const& step) {
    int const last = last_visible_row({.last_row = step.last_row}, first_kv_row()) - first_column();
    hide_after(s, last, last + 8);
  }

  __device__ __forceinline__ void fence_kv() {
    auto dK = cute::make_tensor(&dk_[0], P::kv_layout());
    auto dV = cute::make_tensor(&dv_[0], P::kv_layout());
    wgmma_fence(dK);
    wgmma_fence(dV);
  }

  __device__ int k_slot() const { return slot_of<Config::kKSlots>(chains_); }
  // Of the KV tile: this warp's first row, this thread's first; of S^T: this thread's first column.
  __device__ int kv_row() const { return thread_ / kWarp * 16; }
  __device__ int first_kv_row() const { return kv_row() + thread_ % kWarp / 4; }
  __device__ int first_column() const { return 2 * (thread_ % 4); }

  // Hides where thread_ and warpgroup_ come from, so that what follows from them (addresses,
  // descriptors) is computed again in each step: kept across the loop it costs 27 registers that
  // are not there.
  __device__ void forget_addresses() { asm volatile("" : "+r"(thread_), "+r"(warpgroup_)); }

  __device__ static typename P::Scores scores_mma() { return {}; }

  Storage& smem_;
  MainParams const& params_;
  int thread_;     // among the MMA threads
  int warpgroup_;  // uniform

  uint32_t count_ = 0;   // of steps: slot and parity of every ring follow from it
  uint32_t chains_ = 0;  // finished

  float dk_[P::kKvFragment], dv_[P::kKvFragment];
  uint32_t ds_[P::kScoreFragment / 2];  // dS^T of the last step, operand of its dK
};

}  // namespace dash
