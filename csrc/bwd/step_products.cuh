// What the steps of the MMA warpgroups are made of: the five products, the pieces around them, and
// the state that lives from step to step. The order is mma.cuh's or mma_wide.cuh's.
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
class StepProducts {
 protected:
  using Storage = SharedStorage<Element, Config>;
  using P = Products<Element, Config>;

  __device__ StepProducts(Storage& smem, MainParams const& params, int thread)
      : smem_(smem),
        params_(params),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffff, thread / kWarpgroup, 0)) {}

  __device__ __forceinline__ int receive_step() {
    mbarrier_wait(smem_.q_full[slot_of<Config::kStages>(count_)],
                  parity_of<Config::kStages>(count_), "q_full");
    return smem_.steps[slot_of<Config::kStages>(count_)].flags;
  }

  // Cleared, not overwritten by the first product: as long as dK and dV are alive everywhere, the
  // two copies of step() agree on registers. Otherwise ptxas moves them about, spills and
  // serialises.
  __device__ __forceinline__ void clear_kv() {
#pragma unroll
    for (int i = 0; i < P::kDkFragment; ++i) dk_[i] = 0.f;
#pragma unroll
    for (int i = 0; i < P::kDvFragment; ++i) dv_[i] = 0.f;
  }

  // dQ of the last step; it needs dS of both warpgroups.
  __device__ __forceinline__ void issue_last_dq(float (&dq)[P::kDqFragment]) {
    uint32_t const last = count_ - 1;
    mbarrier_wait(smem_.ds_full[slot_of<Config::kDsStages>(last)],
                  parity_of<Config::kDsStages>(last), "ds_full");
    issue_dq(dq, slot_of<Config::kDsStages>(last));
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

  // S^T = K Q^T. With kFromAccumulator s holds what S starts from.
  template <bool kFromAccumulator = false>
  __device__ __forceinline__ void issue_scores(float (&s)[P::kScoreFragment], int stage) {
    using namespace cute;
    auto const mma = scores_mma().get_slice(warpgroup_ * kWarpgroup);
    auto const sK = make_tensor(make_smem_ptr(smem_.k[k_slot()]), typename P::KLayout{});
    auto const sQ = make_tensor(make_smem_ptr(&smem_.q[0][0]), typename P::QLayout{});
    auto S = make_tensor(&s[0], P::score_layout());
    if constexpr (kFromAccumulator)
      wgmma_fence(S);
    else
      clear(S);
    wgmma_begin();
    wgmma_issue(scores_mma(), mma.partition_fragment_A(sK),
                mma.partition_fragment_B(sQ)(_, _, _, stage), S, kFromAccumulator);
  }

  // dP^T − delta = V dO^T − delta: dp holds −delta
  __device__ __forceinline__ void issue_output_scores(float (&dp)[P::kScoreFragment], int stage) {
    using namespace cute;
    auto const mma = scores_mma().get_slice(warpgroup_ * kWarpgroup);
    auto const sV = make_tensor(make_smem_ptr(smem_.v), typename P::VLayout{});
    auto const sdO = make_tensor(make_smem_ptr(&smem_.dout[0][0]), typename P::DoutLayout{});
    auto dP = make_tensor(&dp[0], P::score_layout());
    wgmma_fence(dP);
    wgmma_begin();
    wgmma_issue(scores_mma(), mma.partition_fragment_A(sV),
                mma.partition_fragment_B(sdO)(_, _, _, stage), dP, true);
  }

  // dV += P^T dO
  __device__ __forceinline__ void issue_dv(uint32_t (&p)[P::kScoreFragment / 2], int stage) {
    auto dV = cute::make_tensor(&dv_[0], P::dv_layout());
    issue_kv<typename P::VGradient, typename P::DoutTransposed>(dV, p, smem_.dout, stage);
  }

  // dK += dS^T Q
  __device__ __forceinline__ void issue_dk(uint32_t (&ds)[P::kScoreFragment / 2], int stage) {
    auto dK = cute::make_tensor(&dk_[0], P::dk_layout());
    issue_kv<typename P::KGradient, typename P::QTransposed>(dK, ds, smem_.q, stage);
  }

  template <typename TiledMma, typename Layout, typename Gradient, int kPacked, int kStages,
            int kElements>
  __device__ __forceinline__ void issue_kv(Gradient& gradient, uint32_t (&packed)[kPacked],
                                           Element (&tiles)[kStages][kElements], int stage) {
    using namespace cute;
    TiledMma tiled_mma;
    auto const mma = tiled_mma.get_slice(warpgroup_ * kWarpgroup);
    auto const transposed = make_tensor(make_smem_ptr(&tiles[0][0]), Layout{});
    auto const a = make_tensor(reinterpret_cast<Element*>(&packed[0]), P::operand_layout());
    wgmma_fence(gradient);
    wgmma_begin();
    wgmma_issue(tiled_mma, a, mma.partition_fragment_B(transposed)(_, _, _, stage), gradient, true);
  }

  // dQ = dS K
  __device__ __forceinline__ void issue_dq(float (&dq)[P::kDqFragment], int ds_stage) {
    using namespace cute;
    typename P::QGradients tiled_mma;
    auto const mma = tiled_mma.get_slice(warpgroup_ * kWarpgroup);
    auto const sdS = make_tensor(make_smem_ptr(&smem_.ds[0][0]), typename P::DsLayout{});
    auto const sKt = make_tensor(make_smem_ptr(smem_.k[k_slot()]), typename P::KTransposed{});
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

  __device__ __forceinline__ void fence_dk() {
    auto dK = cute::make_tensor(&dk_[0], P::dk_layout());
    wgmma_fence(dK);
  }
  __device__ __forceinline__ void fence_dv() {
    auto dV = cute::make_tensor(&dv_[0], P::dv_layout());
    wgmma_fence(dV);
  }

  __device__ __forceinline__ void store_dk(StepDescriptor const& step) {
    store_kv_gradient<Element, DkFragment<Config>>(dk_, params_.softmax_scale, params_.dk,
                                                   params_.dk_parts, params_.head_dims.qk, step,
                                                   thread_);
  }
  __device__ __forceinline__ void store_dv(StepDescriptor const& step) {
    store_kv_gradient<Element, DvFragment<Config>>(dv_, 1.f, params_.dv, params_.dv_parts,
                                                   params_.head_dims.v, step, thread_);
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

  float dk_[P::kDkFragment], dv_[P::kDvFragment];
  uint32_t ds_[P::kScoreFragment / 2];  // dS^T of the last step, operand of its dK
};

}  // namespace dash
