// The MMA warpgroups: one step is five products and the pointwise work between them.
//
// Order of a step, as one warpgroup sees it (the other one fills the tensor core's gaps):
//
//   tensor core   S ─── dP ──────── dV ───────── dQ ── dK ──────────
//   registers        exp2, mask  dS, store dS  │       stage dQ
//                                           barrier
#pragma once

#include "../sm90/bulk_reduce.cuh"
#include "../sm90/named_barrier.cuh"
#include "../sm90/wgmma.cuh"
#include "barriers.h"
#include "dq_fragment.cuh"
#include "epilogue.cuh"
#include "mask.h"
#include "products.cuh"
#include "shared_storage.h"
#include "softmax_grad.cuh"

namespace dash {

__device__ __forceinline__ void arrive_once_per_warp(Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) mbarrier_arrive(barrier);
}

// Stores this warp's 16 rows (kv) of dS^T into the swizzled (q, kv) tile. Matrix m = lane / 8 of the
// four that one stmatrix writes is (columns 8(g + m/2), rows + 8(m % 2)), in fragment order.
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
__device__ void multiply(SharedStorage<Element, Config>& smem, MainParams const& params, int thread) {
  using namespace cute;
  using P = Products<Element, Config>;
  int const warpgroup = __shfl_sync(0xffffffff, thread / kWarpgroup, 0);
  int const lane = thread % kWarp;
  int const kv_row = thread / kWarp * 16;          // this warp's first row of the KV tile
  int const first_column = 2 * (lane % 4);         // this thread's first column of S^T

  auto const sK = make_tensor(make_smem_ptr(smem.k), typename P::KvLayout{});
  auto const sV = make_tensor(make_smem_ptr(smem.v), typename P::KvLayout{});
  auto const sQ = make_tensor(make_smem_ptr(&smem.q[0][0]), typename P::QLayout{});
  auto const sdO = make_tensor(make_smem_ptr(&smem.dout[0][0]), typename P::QLayout{});
  auto const sKt = make_tensor(make_smem_ptr(smem.k), typename P::KvTransposed{});
  auto const sQt = make_tensor(make_smem_ptr(&smem.q[0][0]), typename P::QTransposed{});
  auto const sdOt = make_tensor(make_smem_ptr(&smem.dout[0][0]), typename P::QTransposed{});
  auto const sdS = make_tensor(make_smem_ptr(&smem.ds[0][0]), typename P::DsLayout{});

  typename P::Scores scores_mma;
  typename P::KvGradients kv_mma;
  typename P::QGradients q_mma;
  auto const scores = scores_mma.get_slice(warpgroup * kWarpgroup);
  auto const kv = kv_mma.get_slice(warpgroup * kWarpgroup);
  auto const q = q_mma.get_slice(warpgroup * kWarpgroup);
  auto const k_operand = scores.partition_fragment_A(sK);      // (MMA, kv, d)
  auto const v_operand = scores.partition_fragment_A(sV);      // (MMA, kv, d)
  auto const q_operand = scores.partition_fragment_B(sQ);      // (MMA, q, d, stage)
  auto const dout_operand = scores.partition_fragment_B(sdO);  // (MMA, q, d, stage)
  auto const q_transposed = kv.partition_fragment_B(sQt);      // (MMA, d, q, stage)
  auto const dout_transposed = kv.partition_fragment_B(sdOt);  // (MMA, d, q, stage)
  auto const ds_operand = q.partition_fragment_A(sdS);         // (MMA, q, kv, stage)
  auto const k_transposed = q.partition_fragment_B(sKt);       // (MMA, d, kv)

  float dk_registers[P::kKvFragment], dv_registers[P::kKvFragment];
  auto dK = make_tensor(&dk_registers[0], P::kv_layout());
  auto dV = make_tensor(&dv_registers[0], P::kv_layout());

  Ring<Config::kStages> ring;
  Ring<Config::kDqWriters> writer;  // which writer takes this step's dQ
  Ring<Config::kDqWriters> last_writer(Config::kDqWriters - 1);  // which took the last step's
  Ring<Config::kDsStages> ds_ring;
  bool anything_staged = false;
  uint32_t kv_parity = 0;

  for (;;) {
    int const stage = ring.stage();
    mbarrier_wait(smem.q_full[stage], ring.parity(), "q_full");
    StepDescriptor const step = smem.steps[stage];
    if (step.flags & kEndOfWork) break;
    bool const continues = !(step.flags & kFirstOfChain);
    if (!continues) mbarrier_wait(smem.k_full, kv_parity, "k_full");

    float s_registers[P::kScoreFragment], dp_registers[P::kScoreFragment];
    auto S = make_tensor(&s_registers[0], P::score_layout());
    auto dP = make_tensor(&dp_registers[0], P::score_layout());
    wgmma_fence(S);
    wgmma_begin();
    wgmma_issue(scores_mma, k_operand, q_operand(_, _, _, stage), S, false);

    mbarrier_wait(smem.dout_full[stage], ring.parity(), "dout_full");
    if (!continues) mbarrier_wait(smem.v_full, kv_parity, "v_full");
    wgmma_fence(dP);
    wgmma_begin();
    wgmma_issue(scores_mma, v_operand, dout_operand(_, _, _, stage), dP, false);

    wgmma_wait<1>();  // S
    wgmma_fence(S);
    probabilities(s_registers, &smem.lse_log2[stage][first_column], params.scale_log2);
    if (step.flags & kMasked) {
      int const column = step.kv_tile * Config::kTileKv + kv_row + lane / 4;
      hide(s_registers, first_visible_row(params.problem, step.q_tile, column) - first_column,
           first_visible_row(params.problem, step.q_tile, column + 8) - first_column);
    }
    uint32_t p_packed[P::kScoreFragment / 2], ds_packed[P::kScoreFragment / 2];
    auto const issue_dv = [&] {
      to_operand<Element>(p_packed, s_registers);
      auto const p_operand =
          make_tensor(reinterpret_cast<Element*>(&p_packed[0]), P::operand_layout());
      wgmma_fence(dV);
      wgmma_begin();
      wgmma_issue(kv_mma, p_operand, dout_transposed(_, _, _, stage), dV, continues);
    };
    if constexpr (Config::kDvUnderDs) {
      issue_dv();
      wgmma_wait<1>();  // dP
    } else {
      wgmma_wait<0>();  // dP
    }
    wgmma_fence(dP);
    if (step.flags & kLastOfChain) arrive_once_per_warp(smem.v_empty);
    score_gradients(dp_registers, s_registers, &smem.delta[stage][first_column]);
    to_operand<Element>(ds_packed, dp_registers);
    store_ds<Config>(&smem.ds[ds_ring.stage()][0], ds_packed, kv_row);

    if constexpr (!Config::kDvUnderDs) issue_dv();

    // dQ needs the dS of both warpgroups. One barrier a step is enough: to write this buffer again a
    // warpgroup must pass the next step's barrier, and there the other one's dQ has been waited for.
    fence_proxy_async_shared();
    named_barrier_sync(kDsFull, Config::kMmaThreads);

    float dq_registers[P::kDqFragment];
    auto dQ = make_tensor(&dq_registers[0], P::dq_layout());
    wgmma_fence(dQ);
    wgmma_begin();
    wgmma_issue(q_mma, ds_operand(_, _, _, ds_ring.stage()), k_transposed, dQ, false);
    auto const ds_in_registers =
        make_tensor(reinterpret_cast<Element*>(&ds_packed[0]), P::operand_layout());
    wgmma_fence(dK);
    wgmma_begin();
    wgmma_issue(kv_mma, ds_in_registers, q_transposed(_, _, _, stage), dK, continues);

    wgmma_wait<2>();  // dV
    arrive_once_per_warp(smem.dout_empty[stage]);
    wgmma_wait<1>();  // dQ
    wgmma_fence(dQ);
    if (step.flags & kLastOfChain) arrive_once_per_warp(smem.k_empty);

    // Staging in fragment order: the workspace is private, so a thread's floats stay together.
    if (anything_staged)
      mbarrier_wait(smem.dq_empty[last_writer.stage()], last_writer.parity(), "dq_empty");
    anything_staged = true;
    float4* const staged = reinterpret_cast<float4*>(smem.dq);
#pragma unroll
    for (int i = 0; i < P::kDqFragment / 4; ++i)
      staged[DqFragment<Config>::float4_index(thread, i)] =
          make_float4(dq_registers[4 * i], dq_registers[4 * i + 1], dq_registers[4 * i + 2],
                      dq_registers[4 * i + 3]);
    fence_proxy_async_shared();
    arrive_once_per_warp(smem.dq_full[writer.stage()]);

    wgmma_wait<0>();  // dK
    wgmma_fence(dK);
    wgmma_fence(dV);
    arrive_once_per_warp(smem.q_empty[stage]);

    if (step.flags & kLastOfChain) {
      store_kv_gradients<Element, Config>(params, step, dk_registers, dv_registers, kv_row);
      kv_parity ^= 1;
    }
    last_writer = writer;
    writer.advance();
    ring.advance();
    ds_ring.advance();
  }
}

}  // namespace dash
