// The loader: one thread that turns planned steps into TMA loads.
#pragma once

#include "../sm90/tma.cuh"
#include "shared_storage.h"

namespace dash {

template <typename Element, typename Config>
class Loader {
 public:
  using Storage = SharedStorage<Element, Config>;

  __device__ Loader(Storage& smem, MainParams const& params) : smem_(smem), params_(params) {}

  __device__ void run() {
    prefetch_tensor_map(params_.q);
    prefetch_tensor_map(params_.dout);
    prefetch_tensor_map(params_.k);
    prefetch_tensor_map(params_.v);
    for (int ends = 0; ends < Config::kDqWriters;) {
      StepDescriptor const step = next_planned();
      if (step.flags & kEndOfWork) {
        pass_end(step);
        ++ends;
        continue;
      }
      // K has a slot of its own and goes out while the last chain is still at work; V comes last,
      // because it must wait for that chain's last product with V.
      bool const first = step.flags & kFirstOfChain;
      if (first) load_k(step);
      load_step(step);
      if (first) load_v(step);
    }
  }

 private:
  __device__ StepDescriptor next_planned() {
    int const slot = plan_ring_.stage();
    mbarrier_wait(smem_.plan_full[slot], plan_ring_.parity(), "plan_full");
    StepDescriptor const step = smem_.plan[slot];
    mbarrier_arrive(smem_.plan_empty[slot]);
    plan_ring_.advance();
    return step;
  }

  __device__ void load_step(StepDescriptor const& step) {
    int const stage = ring_.stage();
    int const row = step.q_tile * Config::kTileQ;
    int64_t const padded_row = int64_t{step.dq_tile} * Config::kTileQ;

    mbarrier_wait(smem_.q_empty[stage], ring_.parity() ^ 1, "q_empty");
    smem_.steps[stage] = step;
    mbarrier_arrive_expect_bytes(smem_.q_full[stage], kTileBytes + kVectorBytes);
    bulk_load(smem_.lse_log2[stage], params_.lse_log2 + padded_row, kVectorBytes,
              smem_.q_full[stage]);
    load_tile<Config::kTileQ>(smem_.q[stage], params_.q, smem_.q_full[stage], row, step.head,
                              step.batch);

    mbarrier_wait(smem_.dout_empty[stage], ring_.parity() ^ 1, "dout_empty");
    mbarrier_arrive_expect_bytes(smem_.dout_full[stage], kTileBytes + kVectorBytes);
    bulk_load(smem_.minus_delta[stage], params_.minus_delta + padded_row, kVectorBytes,
              smem_.dout_full[stage]);
    load_tile<Config::kTileQ>(smem_.dout[stage], params_.dout, smem_.dout_full[stage], row,
                              step.head, step.batch);
    ring_.advance();
  }

  __device__ int head_of_k(StepDescriptor const& step) const {
    return step.kv_head / params_.problem.group_split;
  }

  __device__ void load_k(StepDescriptor const& step) {
    int const slot = k_ring_.stage();
    mbarrier_wait(smem_.k_empty[slot], k_ring_.parity() ^ 1, "k_empty");
    mbarrier_arrive_expect_bytes(smem_.k_full[slot], kKvBytes);
    load_tile<Config::kTileKv>(smem_.k[slot], params_.k, smem_.k_full[slot],
                               step.kv_tile * Config::kTileKv, head_of_k(step), step.batch);
    k_ring_.advance();
  }

  __device__ void load_v(StepDescriptor const& step) {
    mbarrier_wait(smem_.v_empty, v_parity_ ^ 1, "v_empty");
    mbarrier_arrive_expect_bytes(smem_.v_full, kKvBytes);
    load_tile<Config::kTileKv>(smem_.v, params_.v, smem_.v_full, step.kv_tile * Config::kTileKv,
                               head_of_k(step), step.batch);
    v_parity_ ^= 1;
  }

  __device__ void pass_end(StepDescriptor const& step) {
    int const stage = ring_.stage();
    mbarrier_wait(smem_.q_empty[stage], ring_.parity() ^ 1, "q_empty at the end");
    smem_.steps[stage] = step;
    mbarrier_arrive(smem_.q_full[stage]);
    ring_.advance();
  }

  // The 128-byte swizzle takes boxes of 64 columns.
  template <int kRows>
  __device__ void load_tile(Element* shared, CUtensorMap const& map, Mbarrier& barrier, int row,
                            int head, int batch) {
#pragma unroll
    for (int column = 0; column < Config::kHeadDim; column += 64)
      tma_load(shared + column * kRows, map, barrier, column, row, head, batch);
  }

  static constexpr int kTileBytes = Config::kTileQ * Config::kHeadDim * sizeof(Element);
  static constexpr int kKvBytes = Config::kTileKv * Config::kHeadDim * sizeof(Element);
  static constexpr int kVectorBytes = Config::kTileQ * sizeof(float);

  Storage& smem_;
  MainParams const& params_;
  Ring<Config::kPlannedSteps> plan_ring_;
  Ring<Config::kStages> ring_;
  Ring<Config::kKSlots> k_ring_;
  uint32_t v_parity_ = 0;
};

}  // namespace dash
