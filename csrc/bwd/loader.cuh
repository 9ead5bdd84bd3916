// The loader: one thread that turns planned steps into TMA loads.
#pragma once

#include "../sm90/bulk_reduce.cuh"
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
    for (int ends = 0; ends < Config::kDqWriters; plan_ring_.advance()) {
      int const slot = plan_ring_.stage();
      mbarrier_wait(smem_.plan_full[slot], plan_ring_.parity(), "plan_full");
      PlannedStep const planned = smem_.plan[slot];
      mbarrier_arrive(smem_.plan_empty[slot]);
      int const flags = planned.step.flags;
      if (flags & kEndOfWork) {
        pass_end();
        ++ends;
      } else {
        // K has a slot of its own and goes out while the last chain is still at work; V comes last,
        // because it must wait for that chain's last product with V. Where K has one slot, it waits
        // longest: for the chain's end.
        bool const first = flags & kFirstOfChain;
        if (first && Config::kKSlots > 1) load_k(planned);
        if (flags & kKeylessRows)
          load_step<true>(planned);
        else
          load_step<false>(planned);
        if (first) load_v(planned);
        if (first && Config::kKSlots == 1) load_k(planned);
      }
    }
  }

 private:
  template <bool kKeyless>
  __device__ void load_step(PlannedStep const& planned) {
    int const stage = ring_.stage();
    int64_t const padded_row = int64_t{planned.step.dq_tile} * Config::kTileQ;

    mbarrier_wait(smem_.q_empty[stage], ring_.parity() ^ 1, "q_empty");
    smem_.steps[stage] = planned.step;
    load_q_side<kKeyless, Config::kHeadDim>(smem_.q[stage], params_.q, smem_.lse_log2[stage],
                                            params_.lse_log2 + padded_row, smem_.q_full[stage],
                                            planned);

    mbarrier_wait(smem_.dout_empty[stage], ring_.parity() ^ 1, "dout_empty");
    load_q_side<kKeyless, Config::kHeadDimV>(
        smem_.dout[stage], params_.dout, smem_.minus_delta[stage], params_.minus_delta + padded_row,
        smem_.dout_full[stage], planned);
    ring_.advance();
  }

  // A tile of Q or dO with its rows' vector. Rows without keys hold anything, NaN too, which a
  // product would spread over the tile although their P is 0: they become zeros.
  template <bool kKeyless, int kColumns>
  __device__ void load_q_side(Element* tile, CUtensorMap const& map, float* vector,
                              float const* source, Mbarrier& full, PlannedStep const& planned) {
    constexpr int kTileBytes = Config::kTileQ * kColumns * sizeof(Element);
    if constexpr (kKeyless) {
      mbarrier_arrive_expect_bytes(smem_.repair, kTileBytes);
      load_tile<Config::kTileQ, kColumns>(tile, map, smem_.repair, planned.q_row, planned.q_slab,
                                          planned.head);
      mbarrier_wait(smem_.repair, repair_parity_, "repair");
      repair_parity_ ^= 1;
      clear_rows<kColumns>(tile, planned.keyless_rows);
      fence_proxy_async_shared();
    }
    mbarrier_arrive_expect_bytes(full, kVectorBytes + (kKeyless ? 0 : kTileBytes));
    bulk_load(vector, source, kVectorBytes, full);
    if constexpr (!kKeyless)
      load_tile<Config::kTileQ, kColumns>(tile, map, full, planned.q_row, planned.q_slab,
                                          planned.head);
  }

  // The swizzle moves sixteen bytes about inside a row of a block, so whole rows are plain.
  template <int kColumns>
  __device__ static void clear_rows(Element* tile, int rows) {
    constexpr int kBlock = 64 * Config::kTileQ;  // elements of a block of 64 columns
#pragma unroll 1
    for (int block = 0; block < kColumns / 64; ++block) {
      auto* const at = reinterpret_cast<uint4*>(tile + block * kBlock);
#pragma unroll 1
      for (int i = 0; i < rows * 8; ++i) at[i] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void load_k(PlannedStep const& planned) {
    int const slot = k_ring_.stage();
    mbarrier_wait(smem_.k_empty[slot], k_ring_.parity() ^ 1, "k_empty");
    mbarrier_arrive_expect_bytes(smem_.k_full[slot], sizeof(smem_.k[slot]));
    load_tile<Config::kTileKv, Config::kHeadDim, Config::kKBoxColumns>(
        smem_.k[slot], params_.k, smem_.k_full[slot], planned.k_row, planned.k_slab,
        planned.kv_head);
    k_ring_.advance();
  }

  __device__ void load_v(PlannedStep const& planned) {
    mbarrier_wait(smem_.v_empty, v_parity_ ^ 1, "v_empty");
    mbarrier_arrive_expect_bytes(smem_.v_full, sizeof(smem_.v));
    load_tile<Config::kTileKv, Config::kHeadDimV>(smem_.v, params_.v, smem_.v_full, planned.k_row,
                                                  planned.k_slab, planned.kv_head);
    v_parity_ ^= 1;
  }

  __device__ void pass_end() {
    int const stage = ring_.stage();
    mbarrier_wait(smem_.q_empty[stage], ring_.parity() ^ 1, "q_empty at the end");
    smem_.steps[stage].flags = kEndOfWork;
    mbarrier_arrive(smem_.q_full[stage]);
    ring_.advance();
  }

  // The 128-byte swizzle takes boxes of 64 columns.
  template <int kRows, int kColumns, int kBoxColumns = 64>
  __device__ void load_tile(Element* shared, CUtensorMap const& map, Mbarrier& barrier, int row,
                            int slab, int head) {
    int const wrap = params_.is_packed() ? kPackedRows : 0;
#pragma unroll
    for (int column = 0; column < kColumns; column += kBoxColumns)
      tma_load(shared + column * kRows, map, barrier, column, row, slab, wrap, head);
  }

  static constexpr int kVectorBytes = Config::kTileQ * sizeof(float);

  Storage& smem_;
  MainParams const& params_;
  Ring<Config::kPlannedSteps> plan_ring_;
  Ring<Config::kStages> ring_;
  Ring<Config::kKSlots> k_ring_;
  uint32_t v_parity_ = 0;
  uint32_t repair_parity_ = 0;
};

}  // namespace dash
