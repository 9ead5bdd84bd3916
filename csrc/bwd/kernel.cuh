// The main kernel: dQ (as ordered fp32 sums), dK and dV of one attention backward.
//
// A persistent CTA takes tickets; a ticket is one or more chains; a chain is one KV tile, whose K
// and V stay in shared memory and whose dK and dV stay in registers while Q and dO stream by. Each
// step's share of dQ is added to global memory when the q tile's turn counter says so, which fixes
// the order of every sum whatever the timing.
//
//   role       threads                  does
//   scheduler  warp 0                   tickets, sequences, schedule, step descriptors
//   loader     warp 1, one lane         TMA loads of K, V, Q, dO, lse, −delta
//   dQ writer  kDqWriters warps,        wait turn, bulk add, wait complete, pass turn; alternating
//              one lane each            over steps
//   MMA        warpgroups 1, 2          the five products, softmax gradient, dK and dV
//
// Steps flow through two rings of kStages slots (Q with lse and descriptor; dO with −delta),
// kKSlots of K, one slot of V, kDsStages of dS between the MMA warpgroups, and one staging buffer
// of dQ between them and the writers (barriers.h has every barrier).
//
//   loader     │ K │ Q,dO 0 │ V │ Q,dO 1 │ · wait slot │ Q,dO 2 │ …
//   MMA        │ · wait │ step 0: S dP dV │ step 1: dK(0) S dQ(0) dP dV │ … │ store dK, dV │ …
//   writer 0   │ read descriptor 0, wait turn ····· │ add 0, pass turn │ ····· add 2 …
//   writer 1   │ read descriptor 1, wait turn ················· │ add 1, pass turn │ …
//
// Progress: in every CTA the oldest unfinished step depends only on its turn, and its turn only on
// smaller tickets or on tickets of its circle, which other CTAs hold (dealer.cuh).
#pragma once

#include "../sm90/grid_dependency.cuh"
#include "../sm90/registers.cuh"
#include "barriers.h"
#include "dq_writer.cuh"
#include "loader.cuh"
#include "mma.cuh"
#include "mma_wide.cuh"
#include "tile_scheduler.cuh"

namespace dash {

enum class Role { kScheduler, kLoader, kDqWriter, kIdle, kMma };
inline constexpr int kFirstDqWriter = 2;  // a warp

template <typename Config>
__device__ Role role_of(int warp) {
  if (warp >= kWarpgroup / kWarp) return Role::kMma;
  if (warp == 0) return Role::kScheduler;
  if (warp == 1) return Role::kLoader;
  return warp - kFirstDqWriter < Config::kDqWriters ? Role::kDqWriter : Role::kIdle;
}

template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward(__grid_constant__ MainParams const params) {
  using Storage = SharedStorage<Element, Config>;
  static_assert(sizeof(Storage) <= kMaxSharedBytes, "shared memory of a CTA is at most 227 KiB");
  extern __shared__ __align__(1024) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);

  int const warp = __shfl_sync(0xffffffff, threadIdx.x / kWarp, 0);
  Role const role = role_of<Config>(warp);
  bool const one_lane = threadIdx.x % kWarp == 0;

  if (threadIdx.x == 0) init_barriers<Storage, Config>(smem);
  __syncthreads();
  // In this order: the conversion reads turn counters as soon as it runs, and preprocess, which
  // resets them, has completed when every CTA is past the wait.
  wait_for_previous_kernel();
  allow_next_kernel();

  if (role == Role::kMma) {
    take_registers_up_to<Config::kMmaRegisters>();
    using Mma = std::conditional_t<Config::kWide, WideMmaWarpgroup<Element, Config>,
                                   MmaWarpgroup<Element, Config>>;
    Mma(smem, params, threadIdx.x - kWarpgroup).run();
  } else {
    release_registers_down_to<Config::kServiceRegisters>();
    if (role == Role::kScheduler) {
      TileScheduler<Element, Config>(smem, params).run(blockIdx.x, gridDim.x);
      return;  // not an else: with one, ptxas spills 12 to 20 bytes in the loader
    }
    if (!one_lane) return;
    if (role == Role::kLoader)
      Loader<Element, Config>(smem, params).run();
    else if (role == Role::kDqWriter)
      write_dq<Element, Config>(smem, params, warp - kFirstDqWriter);
  }
}

}  // namespace dash
